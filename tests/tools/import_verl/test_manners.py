"""Ways in which scripts of verl's users write a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.recipe import Recipe
from megarl.tools.import_verl.translate import translate_file

RUN = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet"
MODEL = "actor_rollout_ref.model.path=model"
MANNERS = {
    "quoted": f'{RUN} {MODEL} "data.max_response_length=1024"',
    "single quotes": f"{RUN} {MODEL} 'data.max_response_length=1024'",
    "plus": f"{RUN} {MODEL} +data.max_response_length=1024",
    "two exported": f"export M=1 N=1024\n{RUN} {MODEL} data.max_response_length=$N",
    "readonly": f"readonly N=1024\n{RUN} {MODEL} data.max_response_length=$N",
    "declared": f"declare -i N=1024\n{RUN} {MODEL} data.max_response_length=$N",
    "assigned default": f": ${{N:=1024}}\n{RUN} {MODEL} data.max_response_length=$N",
    "power": f"{RUN} {MODEL} data.max_response_length=$((2 ** 10))",
    "shift": f"{RUN} {MODEL} data.max_response_length=$((1 << 10))",
    "element": f"A=(512 1024)\n{RUN} {MODEL} data.max_response_length=${{A[1]}}",
    "blanks after the backslash": f"{RUN} \\  \n    {MODEL} \\\t\n    data.max_response_length=1024",
    "line ends of Windows": f"{RUN} \\\r\n    {MODEL} \\\r\n    data.max_response_length=1024\r\n",
    "and": f"[ -z $X ] && N=1024\n{RUN} {MODEL} data.max_response_length=$N",
    "or": f'[ -n "$X" ] || N=1024\n{RUN} {MODEL} data.max_response_length=$N',
    "probe": f"N=$(python3 -c 'import x' 2>/dev/null && echo 2 || echo 1024)\n{RUN} {MODEL} "
    "data.max_response_length=$N",
    "case": 'D=gpu\ncase "${D}" in\n npu)\n  N=2\n  ;;\n tpu|gpu)\n  N=1024\n  ;;\n *)\n  exit 1\n  ;;\nesac\n'
    f"{RUN} {MODEL} data.max_response_length=$N",
    "case in one line": f"case x in (y) N=2 ;; *) N=1024 ;; esac; {RUN} {MODEL} data.max_response_length=$N",
    "case with an open if": "case a in\n a) N=1024 ;;\n b)\n if [ 1 = 1 ]; then\n N=2\n ;;\nesac\n"
    f"{RUN} {MODEL} data.max_response_length=$N",
    "stages": f"stage=$3\nif [ $stage -le 2 ] && [ $4 -ge 2 ]; then\n {RUN} {MODEL} data.max_response_length=1024\nfi",
    "case of an argument": f'case "$3" in\n train) {RUN} {MODEL} data.max_response_length=1024 ;;\nesac',
    "continued by nothing": f"{RUN} \\\n    \\\n    {MODEL} \\\n    \\\n    'data.max_response_length=1024'",
    "process substitution": f'exec > >(tee -a "$LOG") 2>&1\n{RUN} {MODEL} data.max_response_length=1024',
    "words after a pipe": f"{RUN} {MODEL} data.max_response_length=1024 | tee a.log \\\n data.max_response_length=2",
    "here-document": f"cat > x.yaml <<'END'\na: ${{b}} 'c\nEND\n{RUN} {MODEL} data.max_response_length=1024",
    "here-string": f"cat <<< 'x y'\n{RUN} {MODEL} data.max_response_length=1024",
    "pipe": f"{RUN} {MODEL} data.max_response_length=1024 2>&1 | tee $LOG/run.log",
    "variables before": f"A=1 B='x y' {RUN} {MODEL} data.max_response_length=1024",
    "config groups": f"{RUN} --config-path=./config --config-name='ppo' model_engine=megatron {MODEL} "
    "data.max_response_length=1024",
    "torchrun": f"torchrun --nproc_per_node=8 -m {RUN.removeprefix('python3 -m ')} {MODEL} "
    "data.max_response_length=1024",
    "submitted job": f"ray job submit --runtime-env=x.yaml -- {RUN} {MODEL} data.max_response_length=1024",
    "suffix removed": f"M=model.bak\nN=1024k\n{RUN} actor_rollout_ref.model.path=${{M%.bak}} "
    "data.max_response_length=${N%k}",
    "replaced": f"N=10x24\n{RUN} {MODEL} data.max_response_length=${{N//x/}}",
    "empty array": f'A=(\n)\n{RUN} {MODEL} data.max_response_length=1024 "${{A[@]}}"',
    "launcher in an array": f'L=(python3)\nif [ "${{U:-1}}" != 0 ]; then\n uv sync --frozen\n L=(uv run python3)\nfi\n'
    f'"${{L[@]}}" {RUN.removeprefix("python3 ")} {MODEL} data.max_response_length=1024',
    "grouped conditions": 'if [ -z "${A:-}" ] || { [ 2 -gt 1 ] && { [ "$A" = x ] || [ "$A" = y ]; }; }; then\n'
    f'  if [ -n "${{J:-}}" ] && command -v sc >/dev/null 2>&1; then N=1; else N=1024; fi\nfi\n'
    f"{RUN} {MODEL} data.max_response_length=$N",
    "here-document after or": f"[ -f t ] || cat > \"t\" <<'END'\n{{{{ a['b'] + '\\n' }}}}\nEND\n"
    f"{RUN} {MODEL} data.max_response_length=1024",
    "group of commands after or": "[ -d x ] || { git clone y && \\\n  (cd y && git checkout z); }\ncd -\n"
    f"{RUN} {MODEL} data.max_response_length=1024",
    "output of a loop's command": "for v in $(env | awk -F= '/^(A|B)_/{print $1}'); do\n unset \"$v\"\ndone\n"
    f"{RUN} {MODEL} data.max_response_length=1024",
    "name of a file": f"{RUN} actor_rollout_ref.model.path=$(basename /models/model) data.max_response_length=1024",
    "backslash beside a quote": f"{RUN} --config-name='ppo_trainer'\\\n  {MODEL} data.max_response_length=1024",
    "server beside the trainer": "vllm serve judge \\\n  --port 8000 > judge.log 2>&1 &\nJUDGE=$!\n"
    "for ((i=0; i<60; i++)); do\n if curl -s localhost:8000 > /dev/null 2>&1; then\n  break\n fi\n"
    " if ! ps -p $JUDGE > /dev/null 2>&1; then\n  exit 1\n fi\n sleep 5\ndone\n"
    f"CUDA_VISIBLE_DEVICES=0 {RUN} {MODEL} data.max_response_length=1024\nkill $JUDGE\nwait $JUDGE 2>/dev/null",
    "command as a condition": "if ray status --address=localhost:1 >/dev/null 2>&1; then\n echo up\nelse\n"
    " ray start --head \\\n  --port=1 || true\n sleep 5\nfi\n"
    f"PYTHONUNBUFFERED=1 {RUN} {MODEL} data.max_response_length=1024",
    "negated command": "if ! command -v tool &> /dev/null\nthen\n  pip install tool # on all nodes\nfi\n"
    f"if ! grep -q 'import x' \"$HOME/a.py\"; then\n sed -i '1i import x' \"$HOME/a.py\"\nfi\n"
    f"{RUN} {MODEL} data.max_response_length=1024",
    "negative default": f'N=${{N:--1}}\nif [ "$N" -lt 0 ]; then N=1024; fi\n{RUN} {MODEL} data.max_response_length=$N',
    "template written to a file": 'T=\'{% if m["a"] %}{{ "\\n" }}{% endif %}\'\nif [ ! -f "$F" ]; then\n'
    ' mkdir -p "$(dirname "${F}")"\n printf "%s\\n" "${OWN:-${T}}" >"$F"\nfi\n'
    f"{RUN} {MODEL} data.max_response_length=1024",
    "template as a value": f"{RUN} {MODEL} '+actor_rollout_ref.model.override_config.chat_template=\"{{%- if t %}}"
    '{{{{- \\"<|a|>\\\\n\\" }}}}{{\\\\\\"b\\\\\\": \\"\\" }}}}{{% endif %}}"\' data.max_response_length=1024',
    "quotes in a quoted key": f'L="Et*2|t*2L"\n{RUN} {MODEL} "++actor_rollout_ref.actor.x.layout=\'${{L}}\'" '
    "data.max_response_length=1024",
    "all arguments from the first": f'{RUN} {MODEL} "${{@:1}}" \\\n  data.max_response_length=1024',
    "job at an address": f'ray job submit --no-wait --address "$A" \\\n --working-dir "$PWD" \\\n -- {RUN} {MODEL} '
    "data.max_response_length=1024",
    "trainer of another package": f"python -m agents.verl {RUN.partition('main_ppo ')[2]} {MODEL} "
    "data.max_response_length=1024",
    "comments after the last backslash": f"{RUN} {MODEL} \\\n  data.max_response_length=1024 \\\n\n"
    '  # trainer.total_epochs=${{TOTAL}} \\\n  \nrm -rf "${HOME:?}/x/*"',
    "array of its own word": f'M=mod\nM=(actor_rollout_ref.model.path="${{M}}el")\neval "$(conda shell.bash hook)"\n'
    f'{RUN} "${{M[@]}}" data.max_response_length=1024',
    "other arguments": f"shift 1\n{RUN} {MODEL} $@ data.max_response_length=1024",
}


@pytest.mark.parametrize("text", MANNERS.values(), ids=MANNERS.keys())
def test_each_manner_gives_the_same_recipe(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_bytes(f"#!/usr/bin/env bash\nset -xeuo pipefail\n{text}\n".encode())
    recipe = Recipe.model_validate(translate_file(path, ["1024"]).tree)
    assert (recipe.sampling.max_response_tokens, recipe.model.path) == (1024, Path("model"))
    assert recipe.data.train == (Path("train.parquet"),)
