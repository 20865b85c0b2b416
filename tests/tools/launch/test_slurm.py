"""The rendered job: what it asks Slurm for, what it is careful about, and what is refused before it is written."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cli import main as cli
from megarl.config.load import read_recipe
from megarl.config.recipe import Recipe
from megarl.config.section import CPU_SLOT
from megarl.errors import ConfigError
from megarl.tools.launch.slurm import SlurmJob, parse_time, render
from tests.packages import program
from tests.repository import ROOT

FOLDER = Path("/shared/project")
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
LARGE = ROOT / "recipes" / "grpo_70b.yaml"


def recipe(path: Path = QUICKSTART, *overrides: str) -> Recipe:
    return read_recipe(path, overrides).recipe


JOB = SlurmJob(recipe_path=QUICKSTART, folder=FOLDER, nodes=2, gpus_per_node=2, venv=Path("/shared/venv"))


def options(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, flags=re.MULTILINE)


@pytest.mark.needs("shellcheck")
@pytest.mark.parametrize(
    "job",
    [
        JOB,
        replace(
            JOB, time_limit="12:00:00", partition="gpu", account="lab", cpus_per_node=32, overrides=("run.steps=3",)
        ),
        replace(JOB, container="megarl.sif", venv=None),
        replace(
            JOB,
            container="team/megarl:0.1",
            venv=None,
            mounts=(Path("/models"),),
            environment=("NCCL_IB_HCA=mlx5", "WORDS=two words"),
            modules=("cuda/13.0",),
            prolog=Path("/shared/prolog.sh"),
        ),
    ],
    ids=["plain", "everything", "apptainer", "pyxis"],
)
def test_the_script_is_clean_for_shellcheck(job: SlurmJob, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(render(job, recipe()))
    words = [program("shellcheck"), "--severity=style", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_the_job_saves_before_its_time_is_up_and_is_queued_again() -> None:
    script = render(replace(JOB, time_limit="12:00:00"), recipe(QUICKSTART, "checkpoint.grace_s=240"))
    asked = options(script)
    assert "--signal=B:USR1@300" in asked
    assert "--requeue" in asked
    assert "--open-mode=append" in asked
    assert re.search(r"^  75\) requeue 75 ;;$", script, flags=re.MULTILINE)
    assert 'scontrol requeue "$SLURM_JOB_ID"' in script


@pytest.mark.patient
@pytest.mark.parametrize(
    ("name", "lead", "hours"), [("dapo_32b", 300, 24), ("grpo_70b", 480, 16), ("grpo_235b", 1380, 18)]
)
def test_lead_time_and_grace_follow_from_the_plan(
    name: str, lead: int, hours: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "recipes" / f"{name}.yaml"
    assert cli.run(["launch", "slurm", str(path), "--nodes", "40"]) == 0
    asked = options(capsys.readouterr().out)
    assert f"--signal=B:USR1@{lead}" in asked
    assert f"--time={hours}:00:00" in asked
    short = ["launch", "slurm", str(path), "--nodes", "40", "--time", f"{2 * lead // 60 + 1}"]
    if name == "dapo_32b":
        assert cli.run(short) == 2
        assert "a start and the first step take about 3681 s" in capsys.readouterr().err


def test_whole_nodes_unless_told_how_many_cores() -> None:
    assert {"--exclusive", "--mem=0", "--nodes=2"} <= set(options(render(JOB, recipe())))
    partly = options(render(replace(JOB, cpus_per_node=48), recipe()))
    assert "--cpus-per-task=48" in partly
    assert "--exclusive" not in partly


def test_gpus_are_asked_for_only_where_there_are_some() -> None:
    large = replace(JOB, recipe_path=LARGE, nodes=64, gpus_per_node=8)
    script = render(large, recipe(LARGE))
    assert "--gpus-per-node=8" in options(script)
    assert "devices=('--num-gpus=8')" in script
    assert "--gres=gpu:h100:8" in options(render(replace(large, gpu_request="--gres=gpu:h100:8"), recipe(LARGE)))
    on_cpus = render(JOB, recipe())
    assert not [option for option in options(on_cpus) if "gpu" in option]
    assert f"""devices=('--resources={{"{CPU_SLOT}": 2}}')""" in on_cpus


def test_the_token_is_in_a_private_file_and_in_no_argument() -> None:
    script = render(JOB, recipe())
    assert "(umask 077 && " in script
    assert 'RAY_AUTH_TOKEN_PATH="$token_file"' in script
    for line in script.splitlines():
        assert not re.search(r"(srun|ray start|megarl train).*token", line)


def test_nothing_sleeps_and_hopes() -> None:
    script = render(JOB, recipe())
    assert "megarl.tools.launch.ready --nodes" in script
    assert re.findall(r"\bsleep [^;\n]+", script) == ["sleep 0.2"] * 2, "each in a loop that looks at something"
    assert '--num-cpus="$SLURM_CPUS_ON_NODE"' in script


def test_what_a_value_contains_is_never_run(tmp_path: Path) -> None:
    evil = f"run.name=$(touch {tmp_path}/ran); `touch {tmp_path}/ran` ' \" \\"
    script = render(replace(JOB, overrides=(evil,)), recipe())
    head = script.partition("# Everything above")[0]
    shown = subprocess.run(
        ["bash", "-c", head + '\nprintf "%s\\n" "${train_words[@]}"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout == f"train\n{QUICKSTART}\n--set\n{evil}\n"
    assert not (tmp_path / "ran").exists()


def test_a_job_that_brings_the_cluster_up_is_not_queued_again() -> None:
    job = replace(JOB, is_doctor=True, time_limit="0:30:00", first_save_s=7200.0, overrides=("run.steps=3",))
    script = render(job, recipe(QUICKSTART, "checkpoint.grace_s=3600"))
    assert "--no-requeue" in options(script)
    assert "--signal=B:USR1@60" in options(script)
    head = script.partition("# Everything above")[0]
    assert "max_failures=0" in head.replace("'", "")
    words = ["bash", "-c", head + '\necho "${train_words[@]}"']
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    assert shown.stdout == f"doctor {QUICKSTART} --cluster --set run.steps=3\n"


def test_a_container_sees_every_folder_of_the_recipe() -> None:
    outside = recipe(QUICKSTART, "model.path=/models/base", "data.train=[/data/a/train.parquet]", "run.folder=/scratch")
    image = replace(JOB, recipe_path=FOLDER / "recipe.yaml", container="team/megarl:0.1", mounts=(Path("/data"),))
    mounted = "/data:/data,/models/base:/models/base,/scratch:/scratch,/shared/project:/shared/project"
    assert f"mounts='{mounted}'" in render(image, outside)
    sif = render(replace(image, container="megarl.sif"), outside)
    assert "inside=('apptainer' 'exec' '--bind' '/data' '--bind' '/models/base' " in sif
    assert "srun_options=()" in sif
    assert "programs=''" in sif


@pytest.mark.parametrize(
    ("job", "overrides", "problem"),
    [
        (
            replace(JOB, nodes=1),
            (),
            "pools: need 3 gpus, 1 nodes of 2 have 2; ask for --nodes 2",
        ),
        (
            replace(JOB, nodes=3, gpus_per_node=1),
            (),
            "pools.train: needs 2 gpus on each of 1 node(s); 0 of 3 nodes of 1 have them beside the other pools; "
            "ask for more --nodes",
        ),
        (
            replace(JOB, gpus_per_node=3),
            ("pools={a: {gpus_per_node: 2}, b: {gpus_per_node: 2}, c: {gpus_per_node: 2}}",),
            "pools.c: needs 2 gpus on each of 1 node(s); 0 of 2 nodes of 3 have them beside the other pools; "
            "ask for more --nodes",
        ),
        (
            replace(JOB, time_limit="tomorrow"),
            (),
            "--time: 'tomorrow' is not a time for Slurm; write 90, 12:00:00 or 2-12:00:00",
        ),
        (
            replace(JOB, time_limit="5"),
            (),
            "--time: 5 is too short: 180 s before its end the job stops training to save "
            "(checkpoint.grace_s and 60 s for Slurm's clock)",
        ),
        (
            replace(JOB, modules=("cuda; rm",)),
            (),
            "--module: 'cuda; rm' is not the name of a module, such as cuda/13.0",
        ),
        (
            replace(JOB, environment=("NCCL_IB_HCA",)),
            (),
            "--env: 'NCCL_IB_HCA' is not NAME=VALUE, such as NCCL_IB_HCA=mlx5",
        ),
        (
            replace(JOB, partition="gpu\n#SBATCH --uid=0"),
            (),
            "--partition: 'gpu\\n#SBATCH --uid=0' is not one word of letters, digits and .,:=/@+#-_",
        ),
    ],
)
def test_what_cannot_work_is_refused(job: SlurmJob, overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(job, recipe(QUICKSTART, *overrides))
    assert [str(found) for found in caught.value.problems] == [problem]


def test_a_pool_of_several_nodes_needs_room_on_each_of_them() -> None:
    spread = recipe(QUICKSTART, "pools={train: {nodes: 2, gpus_per_node: 1}, rollout: {gpus_per_node: 2}}")
    with pytest.raises(ConfigError, match=r"pools.train: needs 1 gpus on each of 2 node\(s\); 1 of 2 nodes of 2 have"):
        render(replace(JOB, nodes=2), spread)
    render(replace(JOB, nodes=3), spread)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("10:30", 630), ("12:00:00", 43200), ("2-12", 216000), ("1-00:30:05", 88205), ("1h", None)],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    assert cli.run(["data", "make", "arithmetic", "--out", str(folder / "data" / "arithmetic")]) == 0
    return folder


def launch(project: Path, *words: str) -> int:
    model = f"model.path={project}/data/arithmetic/model"
    return cli.run(["launch", "slurm", str(QUICKSTART), "--set", model, *words])


def test_the_command_writes_prints_or_submits(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    capsys.readouterr()
    assert launch(project, "--nodes", "2", "--out", "job.sh") == 0
    assert capsys.readouterr().out == "wrote job.sh; submit it with: sbatch job.sh\n"
    assert launch(project, "--nodes", "2") == 0
    printed = capsys.readouterr().out
    assert printed == (project / "job.sh").read_text()
    assert f"--chdir={project}" in options(printed)

    (project / "bin").mkdir()
    sbatch = project / "bin" / "sbatch"
    sbatch.write_text(f"#!/bin/sh\ncat > {project}/submitted\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}/bin:/usr/bin:/bin")
    assert launch(project, "--nodes", "2", "--submit") == 0
    assert capsys.readouterr().out == "Submitted batch job 7\n"
    assert (project / "submitted").read_text() == printed


def test_mistakes_of_the_command_are_a_sentence(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert launch(project, "--nodes", "1") == 2
    assert "pools: need 3 gpus, 1 nodes of 2 have 2; ask for --nodes 2" in capsys.readouterr().err
    assert launch(project, "--nodes", "2", "--venv", "a", "--container", "b") == 2
    assert "name a --container or a --venv, not both" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(project))
    assert launch(project, "--nodes", "2", "--submit") == 5
    assert capsys.readouterr().err.startswith("megarl: sbatch not found; ")


@pytest.mark.patient
def test_a_job_is_written_for_paths_of_the_cluster_if_the_run_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = ROOT / "recipes" / "grpo_7b.yaml"
    words = ["launch", "slurm", str(recipe), "--nodes", "4", "--out", "job.sh"]
    assert cli.run(words) == 0, capsys.readouterr().err
    assert "not on this machine, checked when the job starts: " in capsys.readouterr().err
    too_much = ["--set", "train.tokens_per_micro_batch=4000000"]
    (tmp_path / "job.sh").unlink()
    assert cli.run([*words, *too_much]) == 2
    error = capsys.readouterr().err
    assert "does not fit " in error
    assert "--override-fit writes the job anyway" in error
    assert not (tmp_path / "job.sh").exists()
    assert cli.run([*words, *too_much, "--override-fit"]) == 0


@pytest.mark.patient
def test_every_job_of_the_first_day_on_a_cluster_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/operations.md, with the recipe that it tells to copy."""
    page = (
        (ROOT / "docs" / "operations.md")
        .read_text()
        .partition("## The first day on a cluster")[2]
        .partition("\n## ")[0]
    )
    assert "cp recipes/dapo_32b.yaml mine.yaml" in page
    commands = re.findall(r"`megarl (launch slurm mine\.yaml [^`]*)`", page)
    assert len(commands) == 3
    for number, command in enumerate(commands):
        words = command.replace("mine.yaml", str(ROOT / "recipes" / "dapo_32b.yaml")).split()
        assert words.pop() == "--submit"
        script = tmp_path / f"{number}.sh"
        assert cli.run([*words, "--out", str(script)]) == 0, capsys.readouterr().err
        assert "#SBATCH --nodes=17" in script.read_text()


def run_part(folder: Path, commands: str, job: SlurmJob = JOB) -> subprocess.CompletedProcess[str]:
    """Run commands with the functions of the script, and a `scontrol` that prints what it is asked."""
    script = render(replace(job, folder=folder, max_failures=1), recipe()).rpartition("\nmain\n")[0]
    prelude = f"scontrol() {{ echo scontrol $*; }}\njob_folder={folder}\nSLURM_JOB_ID=7\nnodes=(); broken=()\n"
    prelude += "SLURM_JOB_PARTITION=gpu\nsinfo() { seq --format=n%g 0 7; }\n"
    return subprocess.run(
        ["bash", "-c", f"{script}\n{prelude}{commands}"], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_new_checkpoint_gives_a_job_a_new_budget_of_failures(tmp_path: Path) -> None:
    steps = tmp_path / "latest"
    fail = f"latest_step_file={steps}; count_failure 76"
    steps.write_text("4")
    assert "failure 1 of at most 1" in run_part(tmp_path, fail).stdout
    steps.write_text("8")
    assert "failure 1 of at most 1" in run_part(tmp_path, fail).stdout, "step 8 was saved meanwhile"
    last = run_part(tmp_path, fail)
    assert "failure 2, with exit code 76: giving up" in last.stdout
    assert last.returncode == 76


def test_a_warning_before_megarl_has_a_process_is_passed_on(tmp_path: Path) -> None:
    commands = f"""
pid_file={tmp_path}/pid; is_asked=0; is_told=0
trap ask_to_leave USR1
on_node() {{ sleep 1; bash -c 'trap "exit 75" USR1; echo $$ >"$0"; while true; do sleep 0.1; done' {tmp_path}/pid; }}
nodes=(here); logs={tmp_path}
(sleep 0.3; kill -USR1 $$) &
code=0; train || code=$?
echo "megarl ended with $code"
"""
    assert "megarl ended with 75" in run_part(tmp_path, commands).stdout


def test_steps_have_all_cores_and_rays_folder_is_private() -> None:
    script = render(JOB, recipe())
    assert '--cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none' in script
    assert '--temp-dir="$ray_folder/ray"' in script
    assert 'mkdir -p -m 700 "$0"' in script


@pytest.mark.parametrize(("code", "kept"), [(0, False), (75, False), (1, True), (76, True)])
def test_the_logs_of_ray_are_copied_after_a_failure_and_its_folder_is_removed(
    code: int, kept: bool, tmp_path: Path
) -> None:
    logs = tmp_path / "ray" / "ray" / "session_latest" / "logs"
    (logs / "old").mkdir(parents=True)
    (logs / "gcs_server.out").write_bytes(b"a" * 2**20 + b"the end")
    (logs / "old" / "worker-1.err").write_text("it aborted")
    (logs / "empty.out").touch()
    commands = f"""
srun() {{ while [[ $1 == --* ]]; do shift; done; SLURMD_NODENAME=n7 "$@"; }}
timeout() {{ shift; "$@"; }}
ray_folder={tmp_path}/ray; logs={tmp_path}/logs
clean_up {code}
"""
    assert run_part(tmp_path, commands).returncode == 0
    assert not (tmp_path / "ray").exists()
    copies = tmp_path / "logs" / "ray_n7"
    assert copies.exists() is kept
    if kept:
        assert sorted(path.name for path in copies.rglob("*") if path.is_file()) == ["gcs_server.out", "worker-1.err"]
        assert (copies / "gcs_server.out").stat().st_size == 2**20
        assert (copies / "gcs_server.out").read_bytes().endswith(b"the end")


def test_modules_prolog_and_variables_reach_every_step_and_the_environment_of_megarl_comes_first(
    tmp_path: Path,
) -> None:
    prolog = tmp_path / "prolog.sh"
    prolog.write_text('export FROM_PROLOG="$LOADED"\nunset_variable=$NOT_SET\n')
    job = replace(JOB, environment=("WORDS=two words",), modules=("cuda/13.0", "gcc"), prolog=prolog)
    commands = """
module() { [[ $1 == load ]] && shift && export LOADED="$*" PATH="/module/bin:$PATH"; }
load_environment
bash -c 'echo "$WORDS, $FROM_PROLOG, ${PATH%%:/usr*}"'; echo $-
"""
    shown = run_part(tmp_path, commands, job).stdout.splitlines()
    assert shown[0].startswith("two words, cuda/13.0 gcc, /shared/venv/bin:/module/bin")
    assert "e" in shown[1]
    failed = run_part(tmp_path, "module() { return 1; }\nload_environment", job)
    assert failed.returncode == 2
    assert "module load cuda/13.0 gcc failed" in failed.stdout


def test_all_containers_of_a_node_have_its_folder_of_ray(tmp_path: Path) -> None:
    show = f"""
ray_folder=/tmp/megarl-7; logs={tmp_path}; private_folder=true
srun() {{ :; }}
prepare_nodes
printf '%s\\n' "${{srun_options[@]}}" "${{APPTAINER_BIND:-}}"
"""
    pyxis = run_part(tmp_path, show, replace(JOB, container="team/megarl", venv=None, environment=("A=1", "B=2")))
    assert "--container-env=A,B" in pyxis.stdout
    # One name: later steps use the container of the first, whose image is unpacked once.
    assert "--container-name=megarl\n" in pyxis.stdout
    assert ",/tmp/megarl-7:/tmp/megarl-7\n" in pyxis.stdout
    apptainer = run_part(tmp_path, show, replace(JOB, container="megarl.sif", venv=None))
    assert apptainer.stdout.endswith("/tmp/megarl-7\n")


def test_nodes_that_failed_are_excluded_when_the_job_is_queued_again(tmp_path: Path) -> None:
    (tmp_path / "prepared").mkdir()
    for node in ("n0", "n1", "n2"):
        (tmp_path / "prepared" / node).touch()
    (tmp_path / "excluded").write_text("10.0.0.2\n")
    commands = f"""
nodes=(n0 n1 n2 n3); logs={tmp_path}; excluded_file={tmp_path}/excluded
address_of() {{ echo "10.0.0.${{1#n}}"; }}
sleep 60 & ray_steps=($!); true & ray_steps+=($!); sleep 60 & ray_steps+=($!); sleep 0.2
note_broken
kill "${{ray_steps[0]}}" "${{ray_steps[2]}}"
requeue 76
"""
    done = run_part(tmp_path, commands)
    assert done.returncode == 76
    # n1 has lost its Ray, n2 was excluded by megarl, n3 was never ready.
    assert "scontrol update JobId=7 ExcNodeList=n1,n2,n3" in done.stdout
    assert done.stdout.index("scontrol requeue 7") < done.stdout.index("scontrol update")
    # The next attempt has other nodes, and adds to the list.
    later = run_part(tmp_path, f"nodes=(n4); broken=(n4); excluded_file={tmp_path}/none\nrequeue 1")
    assert "ExcNodeList=n1,n2,n3,n4" in later.stdout


def test_no_node_is_excluded_where_the_job_would_wait_for_ever_without_it(tmp_path: Path) -> None:
    """Count the nodes of the partition, eight here, or those of a reservation."""
    commands = "nodes=(n0 n1 n2 n3 n4 n5 n6 n7); broken=(n1); excluded_file=none\nrequeue 1"
    done = run_part(tmp_path, commands)
    assert "n1 not excluded: there are 7 others, and the job needs 8; ask for spare nodes" in done.stdout
    assert "ExcNodeList" not in done.stdout
    reserved = """
SLURM_JOB_RESERVATION=ours
scontrol() { echo "scontrol $*"; echo "ReservationName=ours Nodes=n[0-2] NodeCnt=3"; }
sinfo() { echo "$*" >>asked; printf '%s\\n' n0 n1 n2; }
nodes=(n0 n1); broken=(n1); excluded_file=none
requeue 1"""
    done = run_part(tmp_path, f"cd {tmp_path}\n{reserved}")
    assert "ExcNodeList=n1" in done.stdout
    assert "--partition=gpu --nodes=n[0-2] " in (tmp_path / "asked").read_text()


def test_a_job_that_is_displaced_blames_no_node(tmp_path: Path) -> None:
    commands = """
scontrol() { [[ $1 == show ]] && echo "PreemptTime=$(date +%FT%T -d '+1 min')" || echo "scontrol $*"; }
began=$(date +%s); nodes=(n0 n1); broken=(n0 n1); excluded_file=none; latest_step_file=none
count_failure 1"""
    done = run_part(tmp_path, commands)
    assert done.returncode == 75
    assert "ExcNodeList" not in done.stdout
    assert not (tmp_path / "bad_nodes").exists()
