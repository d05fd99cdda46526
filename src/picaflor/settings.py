"""Every option of the program in one frozen table, and the only reader of the environment.

Must not know what an option does: it turns words into checked values and says where a wrong one was found.

A value comes from the flag, else from `PICAFLOR_<NAME>`, else from the config file, else from the table's default. An
empty environment variable counts as unset. The config file is TOML, one key per option:
`$XDG_CONFIG_HOME/picaflor/config.toml` (`~/.config/...`), or the one named by `--config` or `PICAFLOR_CONFIG`.
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from picaflor import c_engine as compat
from picaflor import option_kinds as kinds
from picaflor.c_engine import CEngine
from picaflor.errors import UsageError
from picaflor.option_kinds import Kind

PREFIX = "PICAFLOR_"
ENGINE_COMMANDS = ("run", "chat", "eval", "plan", "tune", "bench decode")
TEXT_COMMANDS = ("run", "chat")
RUN_COMMANDS = ("run", "chat", "eval", "bench decode")
DATA_COMMANDS = (
    "run",
    "eval",
    "plan",
    "tune",
    "inspect",
    "capabilities",
    "doctor",
    "convert",
    "bench decode",
    "bench kernels",
    "bench disk",
    "mirror verify",
    "verify",
)
GROUP_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
MOST_EPS = 1e-2
ALL_COMMANDS = tuple(dict.fromkeys((*ENGINE_COMMANDS, *TEXT_COMMANDS, *DATA_COMMANDS)))


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table. `commands` are those that take it as a flag; none means environment and file only.

    `unset` says what happens where a default of None is left; `other_help` has the text for commands where the option
    means something else.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    commands: tuple[str, ...]
    short: str | None = None
    unset: str = ""
    other_help: Mapping[str, str] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        """As `--top-p`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As `PICAFLOR_TOP_P`."""
        return PREFIX + self.name.upper()

    def help_for(self, command: str) -> str:
        """The text of `command --help`, default included."""
        if command in self.other_help:
            return self.other_help[command]
        default = self.unset if self.default in (None, False, ()) else str(self.default)
        return self.help + (f" Default: {default}." if default else "")


def _option(
    kind: Kind,
    default: Any,
    help: str,
    commands: tuple[str, ...],
    short: str | None = None,
    *,
    unset: str = "",
    other_help: Mapping[str, str] | None = None,
) -> Any:
    row = {"kind": kind, "help": help, "commands": commands, "short": short, "unset": unset}
    return field(default=default, metadata=row | {"other_help": MappingProxyType(dict(other_help or {}))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The table, and the values of one run. Sizes are in bytes; None means that the program decides."""

    ram: int | None = _option(
        kinds.size(),
        None,
        "Most anonymous and locked memory of the whole process.",
        ENGINE_COMMANDS,
        unset="what the machine and its limits grant",
    )
    expert_slots: int | None = _option(
        kinds.count(1), None, "Experts kept in memory per layer.", ENGINE_COMMANDS, unset="as many as fit in memory"
    )
    ctx: int | None = _option(
        kinds.count(1),
        None,
        "Most tokens of prompt and answer together.",
        ENGINE_COMMANDS,
        unset="4096, or the model's maximum where that is less",
        other_help={"eval": "Most tokens of a window. Default: that of --window."},
    )
    threads: int | None = _option(
        kinds.count(1, 1024),
        None,
        "Threads that multiply.",
        (*ENGINE_COMMANDS, "bench kernels", "convert"),
        unset="what the machine grants",
        other_help={
            "convert": "Threads that read and encode. Default: one per processor.",
            "bench kernels": "Threads of the second line; the first has one. Default: what the machine grants.",
        },
    )
    backend: str = _option(
        kinds.choice("auto", "cpu", "cuda", "rocm", "metal", "vulkan"),
        "auto",
        "Device that computes; auto is the CPU.",
        (*ENGINE_COMMANDS, "capabilities", "verify"),
    )
    device: str = _option(
        kinds.devices(),
        "auto",
        "GPUs of --backend cuda or rocm, by number; several share the layers by their free memory; auto is the first.",
        (*RUN_COMMANDS, "tune"),
    )
    vram: int | None = _option(
        kinds.size(),
        None,
        "Most memory of the GPU, or of each: weights, cache and work first, experts in the rest.",
        (*ENGINE_COMMANDS, "doctor"),
        unset="0.92 of what is free",
        other_help={
            "plan": "Most memory of the GPU that the plan is for, the size of one where none is here. Default: 0.92 of"
            " what is free."
        },
    )
    precision: str = _option(
        kinds.choice("fast", "standard", "exact"),
        "standard",
        "Activations in one int8 plane, in two, or in three.",
        (*ENGINE_COMMANDS, "bench kernels"),
    )
    isa: str = _option(
        kinds.choice("auto", "scalar", "avx2", "avxvnni", "avx512-base", "avx512", "neon"),
        "auto",
        "Instruction set of the CPU kernels; same bits from each.",
        (*ENGINE_COMMANDS, "bench kernels", "capabilities", "verify"),
    )
    prefill_chunk: int | None = _option(
        kinds.count(1),
        None,
        "Most prompt tokens that go through a layer together.",
        ENGINE_COMMANDS,
        unset="what makes the disk read least, 256 to 8192",
    )
    router_top_p: float = _option(
        kinds.real(0, 1, open_low=True),
        1.0,
        "LOSSY: decoded tokens use the first experts that reach this part of the router's weights.",
        RUN_COMMANDS,
    )
    experimental_expert_budget: int | None = _option(
        kinds.count(0),
        None,
        "LOSSY, EXPERIMENTAL: most experts per layer and step that decoded tokens may have read from disk.",
        RUN_COMMANDS,
        unset="no limit",
    )
    read_threads: int | None = _option(
        kinds.count(1, 256), None, "Threads that read experts from disk.", ENGINE_COMMANDS, unset="8"
    )
    queue_depth: int | None = _option(
        kinds.count(1, 1024), None, "Reads under way at once, with io_uring.", ENGINE_COMMANDS, unset="8"
    )
    read_engine: str = _option(
        kinds.choice("auto", "threads", "io_uring"),
        "auto",
        "What carries reads out; auto is threads.",
        (*ENGINE_COMMANDS, "bench disk"),
        other_help={"bench disk": "What carries reads out. Default: all that the system allows, one after the other."},
    )
    direct: str = _option(
        kinds.choice("auto", "on", "off"),
        "auto",
        "Read experts past the page cache; auto: unless memory can hold two thirds of those without a slot.",
        ENGINE_COMMANDS,
    )
    mapped: str = _option(
        kinds.choice("auto", "on", "off"),
        "auto",
        "Use experts where they lie in mapped files, without a copy; auto: where the files are in memory (tmpfs).",
        ENGINE_COMMANDS,
    )
    split: tuple[str, ...] = _option(
        kinds.texts("DIR"),
        (),
        "Directory with more of the model's shards; may be repeated.",
        (*ENGINE_COMMANDS, "inspect", "capabilities", "doctor", "convert", "mirror verify"),
    )
    mirror: tuple[str, ...] = _option(
        kinds.texts("DIR"),
        (),
        "Directory with copies of shards, on another drive, to read from as well; may be repeated.",
        ENGINE_COMMANDS,
    )
    policy: str = _option(
        kinds.choice("auto", "forecast", "heat", "lru", "pins"),
        "auto",
        "Which experts stay in memory; auto tries all on the live routes and has the best in force.",
        ENGINE_COMMANDS,
    )
    prefetch: str = _option(
        kinds.choice("auto", "on", "off"),
        "auto",
        "Read experts of the next layer before they are asked for; auto measures whether that pays and else leaves it.",
        ENGINE_COMMANDS,
    )
    usage: str = _option(
        kinds.text("auto, off or a path"),
        "auto",
        "History of experts used, for pins: auto keeps one per model under $XDG_STATE_HOME/picaflor/usage; a PATH named"
        " .coli_usage is kept in that format.",
        ENGINE_COMMANDS,
    )
    record_routes: Path | None = _option(
        kinds.path(),
        None,
        "Write which experts were asked for to this file, for plan --replay.",
        ("run", "eval", "bench decode"),
    )
    group_size: int | None = _option(
        kinds.one_of(*GROUP_SIZES),
        None,
        "Group size of int4-grouped tensors in a container that does not state it.",
        (*ENGINE_COMMANDS, "inspect", "capabilities", "doctor", "convert"),
        unset="as the sizes of the tensors tell",
        other_help={"convert": "Group size of the int4-grouped tensors that are written. Default: 64."},
    )
    latent_norm_eps: float | None = _option(
        kinds.real(0, MOST_EPS, open_low=True),
        None,
        "eps of the norms of the MLA latents, whatever the config states.",
        ENGINE_COMMANDS,
        unset="that of the config, 1e-06 where it states none",
    )
    disable: tuple[str, ...] = _option(
        kinds.texts("BACKEND.OP[.FORMAT]"),
        (),
        "Kernel not to be used; may be repeated.",
        (*ENGINE_COMMANDS, "capabilities"),
    )
    strict: bool = _option(
        kinds.switch(),
        False,
        "Make every fallback and every unknown config key an error.",
        (*ENGINE_COMMANDS, "inspect", "capabilities", "convert"),
    )
    max_tokens: int = _option(kinds.count(1), 256, "Most tokens to write.", TEXT_COMMANDS, "-n")
    temperature: float = _option(kinds.real(0, 2), 0.7, "Sampling temperature; 0 is greedy.", TEXT_COMMANDS)
    top_p: float = _option(kinds.real(0, 1, open_low=True), 0.9, "Sample from this much probability.", TEXT_COMMANDS)
    seed: int | None = _option(
        kinds.count(0, 2**64 - 1),
        None,
        "Seed of the sampler; --profile tells it.",
        TEXT_COMMANDS,
        unset="drawn anew",
    )
    stop: tuple[str, ...] = _option(kinds.texts("TEXT"), (), "End before this text; may be repeated.", TEXT_COMMANDS)
    chat: bool = _option(kinds.switch(), False, "Put the prompt into the model's chat template.", ("run",))
    profile: bool = _option(
        kinds.switch(), False, "Report speed, reads, memory and what limits, on stderr.", TEXT_COMMANDS
    )
    tuned: bool = _option(
        kinds.switch(), True, "Use what tune has measured for this machine and model.", RUN_COMMANDS, unset="yes"
    )
    tuned_file: Path | None = _option(
        kinds.path(),
        None,
        "File of tuned options to use instead of the machine's own.",
        (*RUN_COMMANDS, "tune"),
        unset="$XDG_STATE_HOME/picaflor/tuned.json",
        other_help={"tune": "File to write instead of the machine's own ($XDG_STATE_HOME/picaflor/tuned.json)."},
    )
    compat_env: bool = _option(
        kinds.switch(),
        False,
        "Take the C engine's variables (SNAP, PROMPT, NGEN, TEMP, CTX, RAM_GB, ...) too, and name those unknown here.",
        ("run",),
    )
    memory_rate: int | None = _option(
        kinds.size(),
        None,
        "Bytes per second that memory gives, instead of measuring.",
        ("plan",),
        unset="measured once and kept",
    )
    disk_rate: int | None = _option(
        kinds.size(),
        None,
        "Bytes per second that the disk gives, instead of measuring.",
        ("plan",),
        unset="measured once and kept",
    )
    json: bool = _option(kinds.switch(), False, "Print the result as JSON.", DATA_COMMANDS)
    config: Path | None = _option(
        kinds.path(), None, "Config file (TOML) to read instead of the usual one.", ALL_COMMANDS
    )
    fail_after: int | None = _option(
        kinds.count(0),
        None,
        "For tests: accelerated calls after this many fail, and the scalar kernels compute them.",
        (),
    )
    test_data: Path | None = _option(kinds.path(), None, "Folder of reference data, for the project's own tests.", ())


TABLE: Mapping[str, Option] = MappingProxyType(
    {
        f.name: Option(
            f.name,
            f.metadata["kind"],
            f.default,
            f.metadata["help"],
            f.metadata["commands"],
            f.metadata["short"],
            f.metadata["unset"],
            f.metadata["other_help"],
        )
        for f in fields(Settings)
    }
)


def load(command: str, flags: Mapping[str, object], *, environ: Mapping[str, str] | None = None) -> Settings:
    """The values for one run of `command`. `flags` holds what the command line gave, None or () where it gave nothing.

    Raises UsageError for an unknown name, with the nearest match, and for a value that its option does not accept.
    """
    environ = os.environ if environ is None else environ
    found: dict[str, tuple[str, object]] = {}
    for name, value in flags.items():
        option = TABLE.get(name)
        if option is None or command not in option.commands:
            raise UsageError(f"{name} is no option of {command}")
        if value is not None and value != ():
            found[name] = (option.flag, value)
    variables = {option.variable: option for option in TABLE.values()}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in variables:
            raise UsageError(f"environment: {_unknown(variable, list(variables), skip=len(PREFIX))}")
        if text:
            found.setdefault(variables[variable].name, (variable, text))
    if "compat_env" in found and _read(TABLE["compat_env"], *found["compat_env"]):
        for name, value in c_engine(environ).values.items():
            found.setdefault(name, value)
    path, entries = _config_entries(found, environ)
    for key, value in entries.items():
        if key not in TABLE or key == "config":
            raise UsageError(f"{path}: {_unknown(key, [name for name in TABLE if name != 'config'])}")
        found.setdefault(key, (f"{path}: {key}", value))
    return Settings(**{name: _read(TABLE[name], place, value) for name, (place, value) in found.items()})


def c_engine(environ: Mapping[str, str] | None = None) -> CEngine:
    """What the environment holds of the C engine's variables."""
    return compat.c_engine(os.environ if environ is None else environ)


def _read(option: Option, place: str, value: object) -> Any:
    try:
        return option.kind.read(value)
    except (ValueError, UsageError):
        shown = ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
        raise UsageError(f"{place}: {shown} is not accepted; give {option.kind.accepts}") from None


def _unknown(name: str, known: list[str], *, skip: int = 0) -> str:
    """One line on an unknown name; the first `skip` letters are a common prefix and say nothing."""
    near = difflib.get_close_matches(name[skip:], [text[skip:] for text in known], n=1, cutoff=0.6)
    rest = f"; did you mean {name[:skip]}{near[0]}?" if near else "; known are " + ", ".join(known)
    return f"{name} is no option{rest}"


MOST_CONFIG_BYTES = 1 << 20


def _config_entries(
    found: Mapping[str, tuple[str, object]], environ: Mapping[str, str]
) -> tuple[Path | None, Mapping[str, object]]:
    if "config" in found:
        place, value = found["config"]
        path: Path = _read(TABLE["config"], place, value)
        if not path.is_file():
            raise UsageError(f"{place}: {path} is no file")
    else:
        base = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else "")
        path = Path(base, "picaflor", "config.toml")
        if not base or not path.is_file():
            return None, {}
    try:
        nbytes = path.stat().st_size
        if nbytes > MOST_CONFIG_BYTES:
            raise UsageError(f"{path}: {nbytes} bytes; at most {MOST_CONFIG_BYTES} are read")
        return path, tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a TOML file: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def state_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where what was measured or learned is kept: `$XDG_STATE_HOME/picaflor` (`~/.local/state/...`); None without a
    home."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME") or (f"{environ['HOME']}/.local/state" if environ.get("HOME") else "")
    return Path(base, "picaflor") if base else None


def test_data() -> Path | None:
    """The folder named by PICAFLOR_TEST_DATA, for the project's own tests."""
    option = TABLE["test_data"]
    text = os.environ.get(option.variable)
    return _read(option, option.variable, text) if text else None


def options(command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a click command's function with its flags from the table; it is called with `settings=Settings`.

    The function's own click options and arguments pass through. Values are checked by `load`, not by click, so that a
    flag, a variable and a config key meet the same words.
    """
    import click

    rows = [option for option in TABLE.values() if command in option.commands]
    if not rows:
        raise ValueError(f"no option in the table belongs to {command!r}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **values: Any) -> Any:
            flags = {option.name: values.pop(option.name) for option in rows}
            return function(*args, settings=load(command, flags), **values)

        decorated: Callable[..., Any] = wrapper
        for option in reversed(rows):
            decorated = _click_option(click, option, command)(decorated)
        return decorated

    return decorate


def _click_option(click: Any, option: Option, command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    text = option.help_for(command)
    if isinstance(option.default, bool):
        names = f"{option.flag}/--no-{option.flag[2:]}"
        decorator = click.option(names, option.name, default=None, help=text)
    else:
        names_given = [name for name in (option.short, option.flag) if name]
        decorator = click.option(
            *names_given, option.name, metavar=option.kind.metavar, multiple=option.default == (), help=text
        )
    result: Callable[[Callable[..., Any]], Callable[..., Any]] = decorator
    return result


def reference() -> str:
    """The table as Markdown, for docs/commands.md."""
    lines = ["| flag | variable | default | accepts | does | commands |", "|---|---|---|---|---|---|"]
    for option in TABLE.values():
        flags = ", ".join(f"`{name}`" for name in (option.short, option.flag) if name) if option.commands else "none"
        default = option.unset if option.default in (None, ()) else f"`{str(option.default).lower()}`"
        commands = ", ".join(option.commands)
        does = " ".join([option.help, *(f"{command}: {text}" for command, text in option.other_help.items())])
        cells = (flags, f"`{option.variable}`", default, option.kind.accepts, does, commands)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
