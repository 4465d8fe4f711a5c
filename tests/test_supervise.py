"""The launcher above a training: signals, statuses, terminals and kills, all of them real."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import BIN, environment_of
from test_watcher import SECONDS_ALLOWED, wait_for

from moss_tts_patches.last_words import READINGS_VARIABLE
from moss_tts_patches.launch import supervise as supervise_module
from moss_tts_patches.launch.allocator import NAMES, SETTING, allocator_environment, installed_torch, variable_name
from moss_tts_patches.launch.supervise import prepared_environment, supervise

# -- the launcher -----------------------------------------------------------------------------------------------------

TRAINER = """
import os, signal, sys, time
from pathlib import Path
from moss_tts_patches.memory.watcher import Watcher
Watcher(Path(os.environ[{variable!r}]) / f'{{os.getpid()}}.json', lambda: 'backward').start()
{body}
"""


def training(body: str) -> str:
    return TRAINER.format(variable=READINGS_VARIABLE, body=body)


def run_supervised(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moss_tts_patches.launch.supervise", *command],
        env=environment_of(**variables),
        capture_output=True,
        text=True,
        timeout=SECONDS_ALLOWED,
    )


def test_a_trainer_that_is_really_killed_is_explained() -> None:
    done = run_supervised(sys.executable, "-c", training("os.kill(os.getpid(), signal.SIGKILL)"))
    assert done.returncode == 137 and done.stdout == ""
    assert "[lowmem] The command was killed by the system (SIGKILL, status 137)." in done.stderr
    assert "Last readings of the training process" in done.stderr and "during the backward pass" in done.stderr
    assert "was full" in done.stderr  # "neither … was full", or, on a machine in need, that it was


def test_under_a_launcher_that_turns_the_kill_into_status_1() -> None:
    child = (
        "import subprocess, sys; sys.exit(1 if subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode else 0)"
    )
    done = run_supervised(sys.executable, "-c", child, training("os.kill(os.getpid(), signal.SIGKILL)"))
    assert done.returncode == 1
    assert "[lowmem] A training process ended without a word" in done.stderr


@pytest.mark.parametrize("body", ["raise SystemExit(1)", "raise RuntimeError('said')", "pass"])
def test_a_trainer_that_ends_by_itself_is_not_explained(body: str) -> None:
    done = run_supervised(sys.executable, "-c", training(body))
    assert done.returncode == (0 if body == "pass" else 1)
    assert "[lowmem]" not in done.stderr
    assert ("said" in done.stderr) == ("said" in body)


REFUSAL = (
    "from moss_tts_patches.errors import SettingsError, ending_the_run\n"
    "with ending_the_run():\n    raise SettingsError('too much of it\\nand more')"
)


@pytest.mark.parametrize("between", [True, False])
def test_what_stopped_a_training_is_the_last_line_again(between: bool) -> None:
    """Below accelerate's traceback; where nothing stands in between it is that already."""
    command = [sys.executable, "-c", REFUSAL]
    if between:
        shell = '"$0" -c "$1"; "$0" -c "$1"; echo Traceback >&2; exit 1'
        command = ["sh", "-c", shell, *command[::2]]
    done = run_supervised(*command)
    said = "[lowmem] error: too much of it\nand more\n"
    again = "Traceback\n[lowmem] The training was stopped by this, whatever stands in between: too much of it\n"
    assert (done.returncode, done.stderr) == (1, 2 * said + again if between else said)


def test_the_message_is_in_the_users_language() -> None:
    done = run_supervised("sh", "-c", "kill -9 $$", LC_ALL="zh_CN.UTF-8", PYTHONIOENCODING="utf-8")
    assert done.returncode == 137 and "命令被系统杀死" in done.stderr


def test_status_and_streams_are_the_commands_own() -> None:
    done = run_supervised("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    missing = run_supervised("no-such-program")
    assert (missing.returncode, missing.stderr) == (127, "[lowmem] error: no-such-program: command not found.\n")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    run_supervised("sh", "-c", f"ls -d ${READINGS_VARIABLE}; kill -9 $$", TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_supervisor_is_light() -> None:
    code = (
        "import sys; import moss_tts_patches.launch.supervise\n"
        "print([name for name in ('torch', 'transformers', 'pydantic', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment_of(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


SAVES = (
    "import signal, sys, time\nfrom pathlib import Path\nready, saved = map(Path, sys.argv[1:3])\n"
    "def end(number, _):\n    time.sleep(0.5)\n    saved.write_text(str(number))\n    sys.exit(128 + number)\n"
    "signal.signal(signal.SIGTERM, end)\nsignal.signal(signal.SIGINT, end)\nready.write_text('')\n"
    "deadline = time.monotonic() + 20\nwhile time.monotonic() < deadline:\n    time.sleep(0.05)\n"
)


@pytest.mark.parametrize(
    ("number", "watched"), [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGINT, False)]
)
@pytest.mark.parametrize("program", ["supervise", "moss-lowmem"])
def test_signals_are_passed_on_and_saving_is_waited_for(
    tmp_path: Path, number: signal.Signals, watched: bool, program: str
) -> None:
    """The command is a shell, as upstream's run_train.sh is: by itself it would die at once and leave the training."""
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    script = tmp_path / "trainer.py"
    script.write_text(training(SAVES) if watched else SAVES)
    shell = f"'{sys.executable}' '{script}' '{ready}' '{saved}'; exit 1"
    wrapper = [sys.executable, "-m", "moss_tts_patches.launch.supervise"]
    if program == "moss-lowmem":
        wrapper = [str(BIN / "moss-lowmem"), "run"]
    # Not a pipe: reading one to its end would wait for the training, whatever the launcher does.
    errors = tmp_path / "errors"
    with (
        errors.open("w") as file,
        subprocess.Popen(
            [*wrapper, "bash", "-c", shell],
            env=environment_of(),
            stdin=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,  # no terminal that would tell everyone
        ) as process,
    ):
        wait_for(ready.exists)
        process.send_signal(number)
        process.wait(timeout=SECONDS_ALLOWED)
        assert saved.read_text() == str(int(number))
    assert process.returncode == 128 + number
    assert ("passed on by this launcher" in errors.read_text()) == (number == signal.SIGTERM)


def test_what_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """Under nohup, SIGHUP must not end the training when the terminal goes."""
    ready = tmp_path / "ready"
    command = f"trap '' HUP; exec '{sys.executable}' -m moss_tts_patches.launch.supervise "
    command += f"sh -c 'touch \"{ready}\"; sleep 1; echo trained'"
    with subprocess.Popen(["sh", "-c", command], env=environment_of(), stdout=subprocess.PIPE, text=True) as process:
        wait_for(ready.exists)
        process.send_signal(signal.SIGHUP)
        output, _ = process.communicate(timeout=SECONDS_ALLOWED)
    assert (process.returncode, output) == (0, "trained\n")


def test_a_terminals_interrupt_is_not_passed_on_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With control: the same signal is passed on where no terminal has told the command already."""
    for foreground, expected in ((True, "0"), (False, "1")):
        monkeypatch.setattr(supervise_module, "_in_foreground", lambda: foreground)  # noqa: B023
        count = tmp_path / f"count-{foreground}"
        code = (
            "import os, pathlib, signal, sys, time\nseen = []\n"
            "signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))\n"
            "os.kill(os.getppid(), signal.SIGINT)\ndeadline = time.monotonic() + float(sys.argv[2])\n"
            "while not seen and time.monotonic() < deadline:\n    time.sleep(0.01)\n"
            "pathlib.Path(sys.argv[1]).write_text(str(len(seen)))"
        )
        seconds = "0.5" if expected == "0" else str(SECONDS_ALLOWED)
        status = supervise(sys.executable, [sys.executable, "-c", code, str(count), seconds], environment_of())
        assert (status, count.read_text()) == (0, expected)


def test_ctrl_c_on_a_real_terminal_arrives_once(tmp_path: Path) -> None:
    ready, count = tmp_path / "ready", tmp_path / "count"
    code = (
        "import pathlib, signal, sys, time\nseen = []\n"
        "signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))\n"
        "pathlib.Path(sys.argv[1]).write_text('')\ndeadline = time.monotonic() + 20\n"
        "while not seen and time.monotonic() < deadline:\n    time.sleep(0.01)\n"
        "time.sleep(0.5)\npathlib.Path(sys.argv[2]).write_text(str(len(seen)))"
    )
    arguments = [sys.executable, "-m", "moss_tts_patches.launch.supervise", sys.executable, "-c", code]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*arguments, str(ready), str(count)], environment_of())
    wait_for(ready.exists)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert (os.waitstatus_to_exitcode(status), count.read_text()) == (0, "1")


def test_a_file_that_is_no_program_is_said(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x00\x01")
    program.chmod(0o755)
    done = subprocess.run(
        [str(BIN / "moss-lowmem"), "run", str(program)], env=environment_of(), capture_output=True, text=True
    )
    assert done.returncode == 126 and done.stderr == f"[lowmem] error: {program}: Exec format error.\n"


# -- the allocator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.6.0+cu124", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.9.1", "PYTORCH_CUDA_ALLOC_CONF"),  # has the newer name, and ignores it (pytorch/pytorch#183387)
        ("2.10.0", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.11.0+cu130", "PYTORCH_ALLOC_CONF"),
        ("2.13.0+cpu", "PYTORCH_ALLOC_CONF"),
        ("3.0", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_name_is_the_one_that_torch_reads(version: str, expected: str) -> None:
    assert variable_name(version) == expected
    assert allocator_environment({"A": "b"}, version, native_linux=True) == {"A": "b", expected: SETTING}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["expandable_segments:False", ""])
def test_a_value_of_the_user_stays(name: str, value: str) -> None:
    assert allocator_environment({name: value}, "2.13.0", native_linux=True) == {name: value}


def test_not_on_wsl_nor_for_an_unknown_torch() -> None:
    assert allocator_environment({}, "2.13.0", native_linux=False) == {}
    assert allocator_environment({}, None, native_linux=True) == {}


def test_the_installed_torch_is_found_without_importing_it(tmp_path: Path) -> None:
    import torch

    assert installed_torch(sys.executable) in (str(torch.__version__), torch.__version__.partition("+")[0])
    assert installed_torch(str(BIN / "python3")) == installed_torch(sys.executable)
    assert installed_torch(str(tmp_path / "none")) is None


@pytest.mark.parametrize("wsl", [False, True])
def test_the_training_gets_it_on_native_linux_only(monkeypatch: pytest.MonkeyPatch, wsl: bool) -> None:
    monkeypatch.setattr(supervise_module, "is_wsl", lambda: wsl)
    found = prepared_environment({"A": "b"})
    assert found == ({"A": "b"} if wsl else {"A": "b", "PYTORCH_ALLOC_CONF": SETTING})


def test_this_torch_reads_the_variable() -> None:
    """Also the CPU build; with the control that it reads no other setting from elsewhere."""
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    with_it = allocator_environment(environment_of(), installed_torch(sys.executable), native_linux=True)
    for environment, expected in ((with_it, SETTING), (environment_of(), "")):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert (done.stdout.strip(), done.returncode) == (expected, 0), done.stderr
