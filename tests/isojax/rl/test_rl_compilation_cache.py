"""Compiled programs on the disk: where they are, how to have none, and that what comes back has the same bits."""

import json
import os
import subprocess
import sys

import pytest
from rl_samples import run_config

from contracts.errors import BadConfig
from isojax.cpu_arch import cpu_arch
from isojax.rl.compilation_cache import use_compilation_cache, user_cache

COMPILE_TWICE = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from isojax.rl.compilation_cache import use_compilation_cache
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
hits = []
jax.monitoring.register_event_listener(lambda event, **rest: hits.append(event.endswith("cache_hits")))
x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)
x.block_until_ready()  # Compiled before the cache was turned on.
folder = use_compilation_cache(sys.argv[1], Path(sys.argv[2]))
found = []
for _ in range(2):
    jax.clear_caches()
    found.append(np.asarray(jax.jit(lambda x: jax.nn.softmax(x @ x))(x)).tobytes().hex())
files = [] if folder is None else [path.name for path in folder.iterdir()]
print(json.dumps({"folder": str(folder), "files": len(files), "hits": sum(hits), "same": found[0] == found[1]}))
"""


def compiled_twice(setting, tmp_path):
    own = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment = own | {"XDG_CACHE_HOME": str(tmp_path / "user"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", COMPILE_TWICE, setting, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("setting", "place"), [("default", "user/isojax/compiled"), ("mine", "mine")])
def test_what_was_compiled_is_found_again_with_the_same_bits(setting, place, tmp_path):
    found = compiled_twice(setting, tmp_path)
    assert found["folder"] == str(tmp_path / place / cpu_arch())
    assert found["files"] > 0
    assert found["hits"] > 0
    assert found["same"]


def test_off_keeps_nothing(tmp_path):
    found = compiled_twice("off", tmp_path)
    assert (found["folder"], found["files"], found["hits"]) == ("None", 0, 0)
    assert list(tmp_path.rglob("*")) == []


def test_jaxs_own_variable_goes_before_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "given"))
    assert use_compilation_cache("default", tmp_path) == tmp_path / "given"


@pytest.fixture
def jax_is_told(monkeypatch):
    """What JAX would be told, without telling it: the process has other tests."""
    told = []
    monkeypatch.setattr("jax.config.update", lambda name, value: told.append((name, value)))
    monkeypatch.setattr("isojax.rl.compilation_cache.reset_cache", lambda: None)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    return told


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("file/below", "Not a directory"),
        ("~no-such-user/cache", "home directory"),
        ("a\0b", "null"),
        ("Off", "write ./NAME"),
        (" ", "write ./NAME"),
        ("gs://bucket/cache", "no"),
    ],
)
def test_what_is_no_folder_that_takes_files_is_refused(setting, says, tmp_path, jax_is_told):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig, match=rf'(?s)train\.compilation_cache.*"off".*{says}'):
        use_compilation_cache(setting, tmp_path)
    assert jax_is_told == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_user_without_a_home_or_with_a_full_one_trains_without_a_cache(tmp_path, monkeypatch, capsys, jax_is_told):
    """Nobody asked for the default, so it refuses nothing; but it says so."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / ".cache").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert use_compilation_cache("default", tmp_path) is None
    assert "Not a directory" in capsys.readouterr().err
    monkeypatch.setattr("pathlib.Path.home", _no_home)
    assert use_compilation_cache("default", tmp_path) is None
    assert "Could not determine home directory. train.compilation_cache" in capsys.readouterr().err
    assert jax_is_told == [("jax_compilation_cache_dir", None)] * 2


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_the_users_folder_is_not_one_of_wherever_the_command_was_typed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, expected in (("", ".cache"), ("here", ".cache"), (str(tmp_path / "there"), "there")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert user_cache() == tmp_path / expected / "isojax" / "compiled"


def test_a_folder_that_is_there_but_takes_no_files_is_not_used(tmp_path, monkeypatch, jax_is_told):
    def refused(dir):
        raise OSError(30, "Read-only file system", str(dir))

    monkeypatch.setattr("isojax.rl.compilation_cache.TemporaryFile", refused)
    with pytest.raises(BadConfig, match="Read-only file system"):
        use_compilation_cache("mine", tmp_path)


def test_nobody_else_may_put_programs_into_the_folder(tmp_path, jax_is_told):
    assert use_compilation_cache("mine", tmp_path).stat().st_mode & 0o077 == 0


def test_the_configuration_has_one_by_default():
    assert run_config().train.compilation_cache == "default"
    assert run_config(train={"compilation_cache": "off"}).train.compilation_cache == "off"
