"""The option table: order of sources, every kind's words, refusals with the nearest match."""

from __future__ import annotations

import ast
import os
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import picaflor
from picaflor import settings
from picaflor.c_engine import C_ENGINE, C_ENGINE_FIXED, C_ENGINE_OTHERS, C_ENGINE_WORDS
from picaflor.errors import UsageError
from picaflor.settings import TABLE, Settings, c_engine, load, state_folder

SOURCE = Path(picaflor.__file__).parent


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(settings.PREFIX)]:
        monkeypatch.delenv(name)


def config(tmp_path: Path, text: str) -> dict[str, str]:
    folder = tmp_path / "picaflor"
    folder.mkdir()
    (folder / "config.toml").write_text(text)
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_order_flag_variable_file_default(tmp_path: Path) -> None:
    environ = config(tmp_path, "temperature = 0.25\nseed = 3\nmax_tokens = 9\n")
    environ |= {"PICAFLOR_SEED": "4", "PICAFLOR_MAX_TOKENS": "10"}
    values = load("run", {"max_tokens": "11", "seed": None}, environ=environ)
    assert (values.max_tokens, values.seed, values.temperature, values.top_p) == (11, 4, 0.25, 0.9)


def test_config_under_home(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "picaflor"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('ram = "2GiB"\n')
    assert load("run", {}, environ={"HOME": str(tmp_path)}).ram == 2 * 1024**3
    assert load("run", {}, environ={}).ram is None


def test_named_config_replaces_the_usual_one(tmp_path: Path) -> None:
    environ = config(tmp_path, "seed = 3\nthreads = 2\n")
    other = tmp_path / "other.toml"
    other.write_text("seed = 5\n")
    values = load("run", {"config": str(other)}, environ=environ)
    assert (values.seed, values.threads) == (5, None)
    assert load("run", {}, environ={**environ, "PICAFLOR_CONFIG": str(other)}).seed == 5
    with pytest.raises(UsageError, match=r"--config: .*missing\.toml is no file"):
        load("run", {"config": str(tmp_path / "missing.toml")}, environ=environ)


def test_empty_variable_is_unset() -> None:
    assert load("run", {}, environ={"PICAFLOR_THREADS": ""}).threads is None


def test_flags_not_given_leave_lower_sources() -> None:
    environ = {"PICAFLOR_PROFILE": "yes", "PICAFLOR_STOP": "END"}
    values = load("run", {"profile": None, "stop": ()}, environ=environ)
    assert values.profile is True
    assert values.stop == ("END",)
    assert load("run", {"profile": False}, environ=environ).profile is False


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ram", "700MiB", 734003200),
        ("expert_slots", "1", 1),
        ("ctx", "4096", 4096),
        ("threads", "2", 2),
        ("backend", "cpu", "cpu"),
        ("device", "all", "all"),
        ("device", "01", "1"),
        ("device", "2, 0", "2,0"),
        ("precision", "exact", "exact"),
        ("isa", "avx512", "avx512"),
        ("group_size", "128", 128),
        ("latent_norm_eps", "1e-5", 1e-5),
        ("seed", "18446744073709551615", 2**64 - 1),
        ("temperature", "0", 0.0),
        ("top_p", "1", 1.0),
        ("stop", '["a,b", "c"]', ("a,b", "c")),
        ("stop", "a,b", ("a,b",)),
        ("disable", "cpu.matmul.int3-g64", ("cpu.matmul.int3-g64",)),
        ("strict", "on", True),
        ("strict", "0", False),
        ("test_data", "/data", Path("/data")),
    ],
)
def test_variable_values(name: str, text: str, value: object) -> None:
    assert getattr(load("run", {}, environ={TABLE[name].variable: text}), name) == value


@pytest.mark.parametrize(
    ("name", "text", "accepts"),
    [
        ("ram", "0", "a size above 0, as 16GiB or 700MiB"),
        ("ram", "much", "a size above 0, as 16GiB or 700MiB"),
        ("expert_slots", "0", "a whole number from 1"),
        ("threads", "1025", "a whole number from 1 to 1024"),
        ("threads", "2.5", "a whole number from 1 to 1024"),
        ("threads", "²", "a whole number from 1 to 1024"),
        ("backend", "npu", "one of auto, cpu, cuda, rocm, metal, vulkan"),
        ("device", "0,0", "auto, all, or different numbers from 0 as 0 or 0,1"),
        ("device", "-1", "auto, all, or different numbers from 0 as 0 or 0,1"),
        ("device", "cuda:1", "auto, all, or different numbers from 0 as 0 or 0,1"),
        ("device", "1,", "auto, all, or different numbers from 0 as 0 or 0,1"),
        ("device", "²", "auto, all, or different numbers from 0 as 0 or 0,1"),
        ("device", "1000", "auto, all, or different numbers from 0 as 0 or 0,1"),
        ("precision", "half", "one of fast, standard, exact"),
        ("isa", "sse", "one of auto, scalar, avx2, avxvnni, avx512-base, avx512, neon"),
        ("group_size", "65", "one of 16, 32, 48, 64, 96, 128, 192, 256"),
        ("group_size", "many", "one of 16, 32, 48, 64, 96, 128, 192, 256"),
        ("latent_norm_eps", "0", "a number above 0 to 0.01"),
        ("latent_norm_eps", "0.02", "a number above 0 to 0.01"),
        ("seed", "-1", "a whole number from 0 to 18446744073709551615"),
        ("temperature", "2.01", "a number from 0 to 2"),
        ("temperature", "nan", "a number from 0 to 2"),
        ("top_p", "0", "a number above 0 to 1"),
        ("stop", '["a", 1]', 'text that is not empty, or a list of such texts as ["a", "b"]'),
        ("stop", "[", 'text that is not empty, or a list of such texts as ["a", "b"]'),
        ("strict", "maybe", "one of true, false, yes, no, on, off, 1, 0"),
    ],
)
def test_refused_values_name_place_and_words(name: str, text: str, accepts: str) -> None:
    option = TABLE[name]
    for place, source in ((option.variable, {"environ": {option.variable: text}}), (option.flag, {"environ": {}})):
        flags: dict[str, object] = {name: (text,) if option.default == () else text} if source["environ"] == {} else {}
        if option.default == () and flags:
            continue  # a repeated flag takes any text as it is
        with pytest.raises(UsageError) as caught:
            load("run", flags, **source)
        assert str(caught.value) == f"{place}: {text!r} is not accepted; give {accepts}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature = 1.0", "temprature is no option; did you mean temperature?"),
        ("threads = true", "threads: True is not accepted; give a whole number from 1 to 1024"),
        ("threads = 2.0", "threads: 2.0 is not accepted; give a whole number from 1 to 1024"),
        ("temperature = false", "temperature: False is not accepted; give a number from 0 to 2"),
        ("strict = 1", "strict: 1 is not accepted"),
        ("config = 'x'", "config is no option"),
        ("[run]\nseed = 1", "run is no option"),
        ("seed = ", "not a TOML file"),
    ],
)
def test_refused_config(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load("run", {}, environ=config(tmp_path, text))
    assert str(caught.value).startswith(str(tmp_path / "picaflor" / "config.toml"))
    assert message in str(caught.value)


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"PICAFLOR_RAMM is no option; did you mean PICAFLOR_RAM\?"):
        load("run", {}, environ={"PICAFLOR_RAMM": "1GiB"})
    with pytest.raises(UsageError, match="PICAFLOR_ZQXW is no option; known are PICAFLOR_RAM, "):
        load("run", {}, environ={"PICAFLOR_ZQXW": ""})
    assert load("run", {}, environ={"PICA": "x", "SNAP": "y"}) == Settings()


def test_flag_of_another_command_is_refused() -> None:
    with pytest.raises(UsageError, match="temperature is no option of inspect"):
        load("inspect", {"temperature": "1"}, environ={})


def test_table_is_frozen_and_complete() -> None:
    with pytest.raises(TypeError):
        TABLE["x"] = TABLE["ram"]  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        Settings().ram = 1  # type: ignore[misc]
    for option in TABLE.values():
        assert option.help.endswith("."), option.name
        if option.default not in (None, ()):
            assert option.kind.read(str(option.default)) == option.default


def test_only_settings_reads_the_environment() -> None:
    offenders = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            imported = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if name in ("environ", "getenv", "environb") or {"environ", "getenv"} & set(imported):
                offenders.append(path.relative_to(SOURCE).as_posix())
    assert set(offenders) == {"settings.py"}


def command(seen: list[Any], name: str = "run") -> click.Command:
    @click.command()
    @click.argument("prompt")
    @click.option("--extra", is_flag=True)
    @settings.options(name)
    def run(prompt: str, extra: bool, settings: Settings) -> None:
        """Runs."""
        seen.append((prompt, extra, settings))

    return run


def test_decorator_makes_flags() -> None:
    seen: list[Any] = []
    arguments = ["hello", "--extra", "-n", "5", "--top-p", "0.5", "--stop", "[", "--stop", "b", "--no-strict"]
    result = CliRunner().invoke(command(seen), arguments, env={"XDG_CONFIG_HOME": "/nowhere", "PICAFLOR_STRICT": "1"})
    assert result.exception is None, result.output
    prompt, extra, values = seen[0]
    assert (prompt, extra) == ("hello", True)
    assert values == Settings(max_tokens=5, top_p=0.5, stop=("[", "b"), strict=False)


def test_help_lists_every_flag_of_the_command() -> None:
    text = CliRunner().invoke(command([]), ["--help"], terminal_width=200).output
    for option in TABLE.values():
        assert (option.flag in text) == ("run" in option.commands), option.name
    assert "Default: 0.7." in text


def test_misspelt_flag_names_the_nearest() -> None:
    result = CliRunner().invoke(command([]), ["x", "--temprature", "1"])
    assert result.exit_code == 2
    assert "--temperature" in result.output


def test_command_without_options_is_a_mistake_in_the_code() -> None:
    with pytest.raises(ValueError, match="no option in the table belongs to 'fly'"):
        settings.options("fly")


def test_documentation_is_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "commands.md"
    assert settings.reference() in page.read_text()


def test_defaults_in_words_are_the_programs_own() -> None:
    from picaflor.formats.int4_grouped import GROUP_SIZES
    from picaflor.models.glm_moe_dsa import LATENT_NORM_EPS
    from picaflor.runtime.chunks import LARGEST, SMALLEST
    from picaflor.runtime.plan import DEFAULT_CONTEXT
    from picaflor.store.store import READ_THREADS

    assert TABLE["ctx"].unset == f"{DEFAULT_CONTEXT}, or the model's maximum where that is less"
    assert TABLE["prefill_chunk"].unset.endswith(f", {SMALLEST} to {LARGEST}")
    assert TABLE["read_threads"].unset == str(READ_THREADS)
    assert TABLE["latent_norm_eps"].unset == f"that of the config, {LATENT_NORM_EPS:g} where it states none"
    assert settings.GROUP_SIZES == GROUP_SIZES
    text = CliRunner().invoke(command([]), ["--help"], terminal_width=300).output
    assert "Threads that read experts from disk. Default: 8." in text
    assert "Threads that multiply. Default: what the machine grants." in text


def test_group_size_is_explained_per_command() -> None:
    option = TABLE["group_size"]
    assert option.help_for("convert") == "Group size of the int4-grouped tensors that are written. Default: 64."
    for name in option.commands:
        assert ("does not state it" in option.help_for(name)) == (name != "convert"), name


def test_empty_texts_are_refused_in_plain_words() -> None:
    with pytest.raises(UsageError) as caught:
        load("run", {"stop": ("",)}, environ={})
    accepted = 'text that is not empty, or a list of such texts as ["a", "b"]'
    assert str(caught.value) == f"--stop: '' is not accepted; give {accepted}"


C_ENV = {
    "NGEN": "12",
    "TEMP": "0.5",
    "CTX": "2048",
    "RAM_GB": "1.5",
    "DIRECT": "1",
    "PROF": "1",
    "SNAP": "/models/m",
    "PROMPT": "Hello",
    "PIN_GB": "10",
    "PIPE": "1",
    "MTP": "0",
    "COLI_NUMA": "1",
    "REPIN": "16",
    "PATH": "/bin",
    "CAP": "",
}


def test_variables_of_the_c_engine_are_taken_when_asked_for() -> None:
    found = load("run", {"compat_env": True}, environ=C_ENV)
    assert (found.max_tokens, found.temperature, found.ctx, found.ram) == (12, 0.5, 2048, 1_500_000_000)
    assert (found.direct, found.profile) == ("on", True)
    assert load("run", {"compat_env": True}, environ={"DIRECT": "0"}).direct == "off"


def test_variables_of_the_c_engine_mean_nothing_otherwise() -> None:
    assert load("run", {}, environ=C_ENV) == Settings()


def test_flags_and_own_variables_come_before_those_of_the_c_engine() -> None:
    environ = {**C_ENV, "PICAFLOR_CTX": "512", "PICAFLOR_COMPAT_ENV": "1"}
    found = load("run", {"max_tokens": "3"}, environ=environ)
    assert (found.max_tokens, found.ctx, found.temperature) == (3, 512, 0.5)


@pytest.mark.parametrize(("name", "text"), [("NGEN", "many"), ("TEMP", "/tmp"), ("RAM_GB", "much"), ("DIRECT", "2")])
def test_a_wrong_value_of_the_c_engine_names_its_variable(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"environment: {name}: .* is not accepted; give "):
        load("run", {"compat_env": True}, environ={name: text})


def test_what_the_c_engine_has_and_this_program_has_not_is_listed() -> None:
    found = c_engine(C_ENV)
    assert (found.model, found.prompt) == ("/models/m", "Hello")
    assert found.lines == (
        "PIN_GB=10 does nothing: which experts stay in memory is the cache policy's choice, within --ram",
        "PIPE=1 does nothing: reads always overlap with multiplying",
        "MTP=0 does nothing: drafts are not in this version",
        "variables of the C engine that are not known here: COLI_NUMA, REPIN",
    )
    assert c_engine({"PATH": "/bin"}).lines == ()
    assert not C_ENGINE_OTHERS & {*C_ENGINE, *C_ENGINE_FIXED, *C_ENGINE_WORDS}


def test_state_lies_where_the_system_says() -> None:
    assert state_folder({"XDG_STATE_HOME": "/s", "HOME": "/h"}) == Path("/s/picaflor")
    assert state_folder({"HOME": "/h"}) == Path("/h/.local/state/picaflor")
    assert state_folder({}) is None
