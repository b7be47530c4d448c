"""Compiling the CPU kernels: processes that start together, and ones that are killed meanwhile."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from outrider.engine import cpu_kernels
from outrider.errors import FailedPrecondition

WAIT_S = 20.0


def compiler(name, sources, *, build_directory, **_):
    """In the place of torch's: slow enough for others to come, and as easily blocked."""
    folder = Path(build_directory)
    with (folder / "lock").open("x"):  # Where torch would wait for ever.
        time.sleep(0.3)
        (folder / "outrider_cpu.so").write_text(f"by {os.getpid()}")
    (folder / "lock").unlink()


def compile_in(folder, told):
    cpp_extension.load = compiler
    told.put(cpu_kernels._compile(folder))


def test_what_a_killed_process_left_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.setattr(cpp_extension, "load", compiler)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "lock").touch()
    (tmp_path / "build" / "outrider_cpu.so").write_text("a part of it")
    assert cpu_kernels._compile(tmp_path)
    assert (tmp_path / "outrider_cpu.so").read_text() == f"by {os.getpid()}"


def test_one_of_several_processes_compiles(tmp_path):
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    started = [context.Process(target=compile_in, args=(tmp_path, told)) for _ in range(3)]
    for process in started:
        process.start()
    found = sorted(told.get(timeout=WAIT_S) for _ in started)
    for process in started:
        process.join(WAIT_S)
        assert process.exitcode == 0
    assert found == [False, False, True]


def test_a_machine_without_a_compiler_is_told_what_it_needs(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no c++")

    monkeypatch.setattr(cpp_extension, "load", fail)
    with pytest.raises(FailedPrecondition, match="C\\+\\+ compiler"):
        cpu_kernels._compile(tmp_path)
    assert not (tmp_path / "outrider_cpu.so").exists()
