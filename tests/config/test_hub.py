"""Names of the hub become folders of its cache; the hub is a server of this process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import huggingface_hub.constants
import pytest

from megarl.cli.main import run
from megarl.config.hub import (
    HubError,
    hub_folder,
    is_hub_name,
    missing_shards,
    public_model_name,
    with_local_models,
)
from megarl.config.load import read_recipe
from megarl.families import PUBLIC_MODELS
from megarl.weights.layouts.canonical import num_active_parameters, num_parameters

HERE = Path(__file__).parent


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a model or data set into an empty cache, as the hub's package does; return its folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def write(name: str, *files: str, kind: str = "models") -> Path:
        repository = tmp_path / "hub" / f"{kind}--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0123abcd")
        folder = repository / "snapshots" / "0123abcd"
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).write_text("{}")
        return folder

    return write


def test_a_name_is_what_no_folder_begins_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_hub_name(Path("Qwen/Qwen2.5-7B"))
    for path in ("models/Qwen2.5-7B", "/models/x", "a", "a/b/c", "../a"):
        assert not is_hub_name(Path(path)), path


def test_a_model_in_the_cache_is_its_folder(cache: Callable[..., Path]) -> None:
    folder = cache("Org/Tiny", "config.json", "model.safetensors")
    assert hub_folder("Org/Tiny", kind="model", downloads=False) == folder
    assert hub_folder("Org/Tiny", kind="model", downloads=True) == folder


def test_a_model_with_a_missing_shard_is_not_there_yet(cache: Callable[..., Path]) -> None:
    folder = cache("Org/Large", "config.json", "model-1.safetensors")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert missing_shards(folder) == ["model-2.safetensors"]
    with pytest.raises(
        HubError, match=r"only in part \(model-2\.safetensors is missing\); `megarl train` downloads it"
    ):
        hub_folder("Org/Large", kind="model", downloads=False)


def test_offline_says_so_in_one_line(cache: Callable[..., Path]) -> None:
    with pytest.raises(HubError) as caught:
        hub_folder("Org/Nothing", kind="model", downloads=True)
    assert str(caught.value) == (
        "is neither a folder nor in the local cache of the Hugging Face hub, and the hub cannot be reached (offline); "
        "run `hf download Org/Nothing` where it can"
    )


def test_every_model_of_a_recipe_is_found_or_named(cache: Callable[..., Path], scratch: Path) -> None:
    folder = cache("Org/Tiny", "config.json", "model.safetensors")
    overrides = ["model.path=Org/Tiny", "roles.reference={path: Org/Nothing}"]
    recipe, problems = with_local_models(read_recipe(HERE / "good.yaml", overrides).recipe, downloads=False)
    assert recipe.model.path == folder
    assert [problem.key for problem in problems] == ["roles.reference.path"]


def test_validate_names_the_command_that_fetches_a_model(
    cache: Callable[..., Path], scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(scratch)
    assert run(["validate", "--quick", "--here", str(HERE / "good.yaml"), "--set", "model.path=Org/Nothing"]) == 2
    lines = capsys.readouterr().err.splitlines()[1:]
    assert len([line for line in lines if "model.path" in line]) == 1
    assert "`megarl train` downloads it, or `hf download Org/Nothing`" in lines[0]


class FakeHub(BaseHTTPRequestHandler):
    """The requests by which the hub's package lists and fetches a model; other names are unknown."""

    protocol_version = "HTTP/1.1"
    files = MappingProxyType(
        {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "pytorch_model.bin": b"a pickle"}
    )
    fetched: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/Org/Tiny/tree"):
            listed = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in self.files.items()
            ]
            self._send(json.dumps(listed).encode())
        elif self.path.startswith("/api/models/Org/Tiny"):
            siblings = [{"rfilename": name} for name in self.files]
            self._send(json.dumps({"id": "Org/Tiny", "sha": "a" * 40, "siblings": siblings}).encode())
        elif self.path.startswith("/Org/Tiny/resolve/") and name in self.files:
            self.fetched.append(f"{self.command} {name}")
            self._send(self.files[name])
        else:
            self._send(b"{}", status=404)

    def _send(self, body: bytes, *, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Connection", "close")  # the last question meets no server
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.mark.patient
def test_a_model_is_downloaded_with_progress_and_then_found(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "import sys; from megarl.config.hub import *\n"
        "for line in sys.stdin:\n"
        "    name, how = line.split()\n"
        "    try: print(hub_folder(name, kind='model', downloads=how == 'downloads'), flush=True)\n"
        "    except HubError as error: print(error, flush=True)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    with (
        (tmp_path / "progress").open("w") as progress,
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=progress,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        asking, answers = process.stdin, process.stdout

        def ask(words: str) -> str:
            asking.write(f"{words}\n")
            asking.flush()
            return answers.readline().strip()

        try:
            assert "`megarl train` downloads it" in ask("Org/Tiny looks")
            folder = Path(ask("Org/Tiny downloads"))
            assert (folder / "model.safetensors").read_bytes() == b"weights" * 1000
            assert "GET pytorch_model.bin" not in FakeHub.fetched
            assert ask("Org/Tiny looks") == str(folder)
            assert "the hub has no model of this name that you may read" in ask("Org/Nothing downloads")
        finally:
            server.shutdown()
            server.server_close()
        assert "the hub cannot be reached" in ask("Org/Other downloads")
    assert "Fetching 2 files" in (tmp_path / "progress").read_text()


PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-32b-128k": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "smollm2-135m": 134_515_008,
    "mixtral-8x7b": 46_702_792_704,
    # Without the layer that predicts a second token.
    "qwen3-next-80b-a3b": 79_674_391_296,
    # Without what sees images, too.
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.6-35b-a3b": 34_660_610_688,
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "glm-4.5-air": 106_852_251_264,
    "glm-4.5": 352_797_829_024,
    "glm-4.6": 352_797_829_024,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "phi-4": 14_659_507_200,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "deepseek-r1": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "moonlight-16b-a3b": 15_960_110_208,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
_TEXT_OF = {
    **{f"qwen2.5-vl-{size}": f"qwen2.5-{size}" for size in ("3b", "7b", "32b", "72b")},
    **{
        f"qwen3-vl-{size}": f"qwen3-{text}"
        for size, text in (("2b", "1.7b"), ("4b", "4b"), ("8b", "8b"), ("32b", "32b"))
    },
}
"""The towers of models that see images are not counted: their text is that of another model."""
PARAMETERS |= {name: PARAMETERS[text] for name, text in _TEXT_OF.items()}


def test_every_entry_is_counted() -> None:
    assert set(PARAMETERS) == set(PUBLIC_MODELS)


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    assert num_parameters(PUBLIC_MODELS[name]) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "active"),
    # Published as 3.3B, 22B, 2.7B and 17B; a token meets all of a dense model.
    [
        ("qwen3-30b-a3b", 3_353_032_704),
        ("qwen3-235b-a22b", 22_190_763_520),
        ("qwen1.5-moe-a2.7b", 2_689_173_504),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3.5-397b-a17b", 17_349_040_896),
    ],
)
def test_a_token_meets_as_many_parameters_as_was_published(name: str, active: int) -> None:
    assert num_active_parameters(PUBLIC_MODELS[name]) == active


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("models/Qwen2.5-72B", "qwen2.5-72b"),
        ("Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-405B", "llama-3.1-405b"),
        ("Qwen/Qwen2.5-Math-7B", None),
        ("models/mine", None),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("unsloth/gpt-oss-20b-BF16", "gpt-oss-20b"),
        ("google/gemma-3-1b-it", "gemma-3-1b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b"),
        ("Qwen/Qwen3.5-9B-Base", "qwen3.5-9b"),
    ],
)
def test_folders_and_hub_names_are_recognised(path: str, name: str | None) -> None:
    assert public_model_name(Path(path)) == name
