"""The recipe's `environment` section: the tools of an episode, who decides its turns, and the limits of both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.section import Section, UserCode

CallFormat: TypeAlias = Literal["auto", "hermes", "llama"]
BASH_AGENT = "bash"
"""The agent of `harbor` that is megarl's own."""
Url: TypeAlias = Annotated[str, Field(pattern=r"^(https?|wss?)://\S+$")]


class _Episode(Section):
    max_turns: PositiveInt = 8
    """Responses of the model in one episode; after the last one no call is answered."""
    wall_s: PositiveFloat = 1800
    """Time for one episode, waiting for engines included; past it the episode counts as lost."""
    on_error: Literal["retry", "mask", "fail"] = "retry"
    """The effect of an episode whose environment or score was lost: it is repeated in a fresh environment up to
    `max_attempts` times, then its group is replaced; it is left out of its group and of the loss; it stops the run."""
    max_attempts: PositiveInt = 3
    """Environments that one episode may use up, with `on_error: retry`."""

    @property
    def most_open(self) -> int | None:
        """Episodes that a rollout worker can have open; None: the environment sets no limit."""
        return None


class _WithTools(_Episode):
    max_calls: PositiveInt | None = None
    """Calls of tools in one episode; a further one ends it. null sets no limit besides `max_turns`."""
    malformed_call: Literal["observe", "end"] = "observe"
    """The effect of a call that cannot be read: the model is told and may try again, or the episode ends."""
    call_deadline_s: PositiveFloat = 20
    """Time for one call of a tool, and for the score."""
    max_result_tokens: PositiveInt = 512
    """Tokens of a tool's result, or of the text with which an environment begins; a longer one is cut, with a mark that
    the model sees."""
    call_format: CallFormat = "auto"
    """How the model writes calls: `hermes` is JSON between <tool_call> and </tool_call> (Qwen, Hermes), `llama` a JSON
    object with name and parameters. `auto` takes the one that the chat template writes."""


class PythonToolConfig(Section):
    """A tool `python` that runs code in a kernel sandbox; variables live as long as the episode."""

    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs the model's code as you, with your files and your network: only where the machine is the sandbox."""
    memory_gib: PositiveFloat = 1
    """Memory of all processes of the code together."""
    disk_mib: PositiveInt = 64
    """Size of the sandbox's /tmp and of its /dev/shm; both are in memory."""
    max_processes: PositiveInt = 32
    """Processes and threads of the code."""
    python: Path | None = None
    """The interpreter, with its packages; null is megarl's, without packages."""


class SearchToolConfig(Section):
    """A tool `search` that finds passages by BM25 in Parquet files."""

    documents: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Parquet files, a passage per row."""
    text_key: str = "text"
    """Column with the passage."""
    title_key: str | None = None
    """Column with a title that is shown and searched too; null: there is none."""
    index: Path | None = None
    """The index, built at the first use; null is a file beside the first document."""
    max_results: PositiveInt = 5
    """Passages that one search returns."""


class BuiltInToolsConfig(Section):
    python: PythonToolConfig | None = None
    search: SearchToolConfig | None = None


class ClassEnvironmentConfig(_WithTools):
    kind: Literal["class"]
    """A Python class, one instance per episode: public methods with types and a docstring are
    tools, `score(transcript)` scores."""
    path: Path | None = None
    """Your Python file; a change of it during the run is an error. null has only `tools`, and `reward` scores."""
    name: str | None = None
    """The class; null takes the only class of the file with a method `score`."""
    tools: BuiltInToolsConfig = BuiltInToolsConfig()
    """Tools that megarl brings, beside those of the class."""
    workers: PositiveInt = 64
    """Processes that a rollout worker has at the same time."""
    episodes_per_process: PositiveInt | None = None
    """Episodes that share a process. null: one, or, where all methods of the class are `async`, as many as fit half of
    `memory_gib`, in as many processes as there are cores."""
    episodes_per_worker: PositiveInt = 100
    """After this many a fresh process replaces one that is not shared, so that leaked memory is freed. A shared one is
    replaced when half of its memory is used and its episodes are over."""
    memory_gib: PositiveFloat | None = 4
    """Address space of one process; null sets no limit."""
    cpu_s: PositiveInt | None = 120
    """CPU time of one call, in a process of its own that of all threads together; null sets no limit."""

    @property
    def most_open(self) -> int | None:
        return None if self.episodes_per_process is None else self.workers * self.episodes_per_process


class McpEnvironmentConfig(_WithTools):
    kind: Literal["mcp"]
    """Tools of servers of the Model Context Protocol; `reward` scores."""
    servers: Annotated[dict[str, Url], Field(min_length=1)]
    """URL by name, such as `search: http://tools:8000/mcp`. A server that changes its tools during the run is an
    error."""
    api_key_files: dict[str, Path] = Field(default={})
    """File with the key of a server, by its name; the content is sent only as `Authorization: Bearer ...`."""


class OpenEnvEnvironmentConfig(_WithTools):
    kind: Literal["openenv"]
    """An environment behind OpenEnv's WebSocket: reset with the row's `extra_info`, step, close. The
    reward of the last step is the score, the others are of their turns; without rewards `reward` scores."""
    url: Url
    """Such as `ws://games:8000/ws`."""
    api_key_file: Path | None = None
    """Its content is sent only as `Authorization: Bearer ...`."""
    text_field: str | None = None
    """Each response is an action with its text in this field; null gives the model a tool `step` whose arguments are
    the fields of an action."""


class HarborEnvironmentConfig(_WithTools):
    kind: Literal["harbor"]
    """Tasks in Harbor's format: the model works in a box per episode, the task's tests score. Rows are written by
    `megarl data prepare harbor`. A task's own limits hold before those below."""
    tasks: Path
    """Folder with the tasks, each a folder with a task.toml."""
    agent: Annotated[str, Field(min_length=1)] = BASH_AGENT
    """`bash` gives the model a tool `bash`. Anything else is the command line of an agent inside of the box: it reads
    the prompt from its standard input, and the model's URL and key are in its environment variables."""
    sandbox: Literal["docker", "podman", "bubblewrap"] = "docker"
    """The kind of box: a container, or, where there is no container engine, an unpacked root file system in a kernel
    sandbox without a network."""
    images: dict[str, Path] = Field(default={})
    """For `bubblewrap`: root file systems by the name of an image, as tasks and their Dockerfiles name it, `*` for all
    others. Each is a folder, an archive such as `docker export` writes, or `host`, the node's own /usr."""
    allows_network: bool = False
    """Let containers reach the network, which the tests of many public tasks need, and agents inside of containers."""
    cache: Path = Path("/var/tmp/megarl-boxes")  # noqa: S108 - a folder of its own, which outlives a run
    """Folder of each node for unpacked images and open boxes of `bubblewrap`; not on an overlay file system."""
    cache_gib: PositiveFloat = 64
    """Size of the images that are built or unpacked for tasks; those unused for the longest time are removed."""
    boxes: PositiveInt = 64
    """Boxes that a rollout worker has open at the same time."""
    cpus: PositiveFloat = 1
    """Cores of a box."""
    memory_gib: PositiveFloat = 2
    """Memory of all processes of a box together."""
    disk_gib: PositiveFloat = 10
    """Files that an episode may write."""
    max_processes: PositiveInt = 256
    """Processes and threads of a box."""
    max_turns: PositiveInt = 32
    """Responses of the model in one episode; after the last one no command is run."""
    call_deadline_s: PositiveFloat = 180
    """Time for one command. A task's `agent.timeout_sec` bounds all commands of an episode together."""
    max_result_tokens: PositiveInt = 2048
    """Tokens of a command's output; a longer one is cut, with a mark that the model sees."""

    @property
    def most_open(self) -> int | None:
        return self.boxes


class ChatEnvironmentConfig(_Episode):
    kind: Literal["chat"]
    """Your own agent, which asks the model over HTTP in a dialect of OpenAI or Anthropic; tokens are recorded there."""
    path: Path
    """Your Python file; a change of it during the run is an error."""
    name: str = "run"
    """`async def run(task, base_url, api_key)` returns a float, or a dict with `score`."""
    call_format: CallFormat = "auto"
    """The same key as in `class`."""
    workers: PositiveInt = 64
    """The same key as in `class`."""
    episodes_per_process: PositiveInt | None = None
    """The same key as in `class`: an agent that is `async` shares."""
    episodes_per_worker: PositiveInt = 100
    """The same key as in `class`."""
    memory_gib: PositiveFloat | None = 4
    """The same key as in `class`."""
    cpu_s: PositiveInt | None = 600
    """CPU time of one agent, in a process of its own that of all threads together; null sets no limit."""

    @property
    def most_open(self) -> int | None:
        return None if self.episodes_per_process is None else self.workers * self.episodes_per_process


class CommandEnvironmentConfig(_Episode):
    kind: Literal["command"]
    """Your own agent as a program, unmodified: the model's URL and key are in its environment variables, and its end
    ends the episode."""
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments, such as `[python3, agent.py]`. Each episode has an empty working folder of its
    own: a word that names a file is passed as its absolute path."""
    given: Literal["prompt", "row"] = "prompt"
    """The text on the program's standard input: that of the prompt, or the row as JSON, with the ground truth, for a
    program that scores itself."""
    result: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """File in the working folder with the score that the program wrote, a number or JSON with `score`; null: `reward`
    scores the last response."""
    call_format: CallFormat = "auto"
    """The same key as in `class`."""
    workers: PositiveInt = 64
    """Programs that a rollout worker runs at the same time."""
    memory_gib: PositiveFloat = 4
    """Memory of all processes of a program together."""
    max_processes: PositiveInt = 256
    """Processes of a program."""
    cpu_s: PositiveInt | None = 600
    """CPU time of each process, all threads together; null sets no limit."""

    @property
    def most_open(self) -> int | None:
        return self.workers


class FunctionEnvironmentConfig(_Episode):
    kind: Literal["function"]
    """Your own turns, by tokens, in the rollout worker's process."""
    code: UserCode
    """`async def name(row, session, tokenizer)` uses a `TokenSession` and returns a float, or a dict with `score`."""


ToolEnvironmentConfig: TypeAlias = (
    ClassEnvironmentConfig | McpEnvironmentConfig | OpenEnvEnvironmentConfig | HarborEnvironmentConfig
)
"""The kinds whose turns megarl decides, but for `harbor` with an agent of its own."""
AgentEnvironmentConfig: TypeAlias = ChatEnvironmentConfig | CommandEnvironmentConfig | FunctionEnvironmentConfig
"""The kinds whose turns the user's code decides."""


def has_agent(config: ToolEnvironmentConfig | AgentEnvironmentConfig) -> bool:
    """Whether the user's code decides the turns, and brings the tools."""
    if isinstance(config, HarborEnvironmentConfig):
        return config.agent != BASH_AGENT
    return isinstance(config, ChatEnvironmentConfig | CommandEnvironmentConfig | FunctionEnvironmentConfig)


EnvironmentConfig = Annotated[ToolEnvironmentConfig | AgentEnvironmentConfig, Field(discriminator="kind")]
