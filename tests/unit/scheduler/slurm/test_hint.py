from pathlib import Path

import pytest
from click.testing import CliRunner

from cachefs.errors import ConfigError
from cachefs_scheduler.slurm.config import SlurmHintConfig, load
from cachefs_scheduler.slurm.hint import PLUGIN_DIRECTORY, main

UNITS = {"cachefs-slurm-hint.service", "cachefs-slurm-release.service", "cachefs-slurm-release.timer"}


def test_the_example_has_the_defaults_and_every_key() -> None:
    example = load(PLUGIN_DIRECTORY / "slurm-hint.toml")
    assert example == SlurmHintConfig()
    text = (PLUGIN_DIRECTORY / "slurm-hint.toml").read_text()
    for section in (type(example.service), type(example.slurm)):
        assert all(f"\n{key} = " in text or f"\n#{key} = " in text for key in section.model_fields)


def test_what_is_shipped() -> None:
    shown = CliRunner().invoke(main, ["--files"])
    names = {each.name for each in Path(shown.output.strip()).iterdir()}
    lua = {"cachefs.lua", "job_submit.lua", "cli_filter.lua"}
    scripts = {"cachefs-prolog.sh", "cachefs-epilog.sh"}
    assert names == lua | scripts | {"slurm.conf.example", "slurm-hint.toml", *UNITS}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[service]\naddress = 'http://far:80'", "service.address = 'http://far:80': expected unix:/PATH, https"),
        ("[service]\naddress = 'https://h:1'\ntls_cert = '/c'", "service: tls_cert and tls_key belong together"),
        ("[slurm]\nevery = 5", "slurm.every: is unknown; known: calls_per_second, cluster"),
        ("[slurm]\nwait = 'long'", "slurm.wait = 'long': input should be 'begin' or 'hold'"),
        ("[slurm]\nintervall = 5", "slurm.intervall: is unknown; did you mean interval?"),
        ("[slurm]\nwait_for = 1\ndatasets = 0", "slurm.datasets = '0': input should be"),
        ("slurm", "Expected '='"),
    ],
)
def test_a_wrong_configuration_is_told_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "hint.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^{file}: ") as error:
        load(file)
    assert words in str(error.value)
    assert CliRunner().invoke(main, ["--config", str(file), "--check-config"]).exit_code == 1


def test_a_file_that_is_named_and_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none")


def test_without_slurm(tmp_path: Path) -> None:
    file = tmp_path / "hint.toml"
    file.write_text(f"[slurm]\nhint_file = '{tmp_path}/run/hints'\ncommands = '{tmp_path}'\n")
    done = CliRunner().invoke(main, ["--config", str(file)])
    assert done.exit_code == 1
    assert "there is no scontrol in" in str(done.exception)
