"""``hp train`` as a user runs it: what it writes, how it stops, and the one line when something fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hp_core.errors import HPError
from hp_core.plugins.load import load_plugins
from hp_core.testing.patience import HANG_S
from hp_trainer.command import main
from hp_trainer.launch import threads_per_rank

pytestmark = pytest.mark.distributed
HP = [sys.executable, "-c", "import sys; from hp_core.cli.main import main; sys.exit(main())"]
PHASES = [
    "hp: checking the model and the data",
    "hp: starting 2 processes",
    "hp: building the model",
    "hp: reading the data",
    "hp: initialising the weights",
    "hp: making the first step, the slowest one",
]
MANY_STEPS = ["--set", "train.steps=100000", "--set", "train.eval.every=0"]


def hp_train(recipe: Path, *arguments: str, run: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``hp train`` to its end."""
    command = [*HP, "train", str(recipe), "--run-dir", str(run), *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False)


def told(err: str) -> str:
    """Return what was printed on standard error besides the phases."""
    return "".join(line for line in err.splitlines(keepends=True) if line.rstrip() not in PHASES)


@contextmanager
def training(recipe: Path, *arguments: str, run: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a long ``hp train`` and wait until it has made a step."""
    command = [*HP, "train", str(recipe), "--run-dir", str(run), *MANY_STEPS, *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            deadline = time.monotonic() + HANG_S
            while not steps(run) and job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert steps(run), job.communicate(timeout=HANG_S)
            yield job
        finally:
            job.kill()


def steps(run: Path) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl that are there."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of the job's ranks, in order of rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environ = dict(part.partition("=")[::2] for part in (folder / "environ").read_text().split("\0"))
        except (OSError, ValueError):
            continue
        if parent == job.pid and "RANK" in environ:
            found[int(environ["RANK"])] = int(folder.name)
    return [found[rank] for rank in sorted(found)]


@pytest.fixture(scope="module")
def finished(module_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The run directory and the result of a job of two ranks that came to its end."""
    run = tmp_path_factory.mktemp("finished") / "run"
    sets = ["mesh.tp=2", "checkpoint.export_hf=true", "run.tensorboard=true", "train.eval.batches=0"]
    return run, hp_train(module_recipe, *(part for text in sets for part in ("--set", text)), run=run)


Finished = tuple[Path, "subprocess.CompletedProcess[str]"]


def test_two_ranks_train_and_leave_a_complete_run_directory(finished: Finished) -> None:
    run, result = finished
    assert (result.returncode, result.stderr.splitlines()) == (0, PHASES)
    assert result.stdout.splitlines()[-1].startswith("done after 5 steps: loss ")
    assert [line["step"] for line in steps(run)] == [1, 2, 3, 4, 5]
    names = {"recipe.yaml", "plan.json", "metrics.jsonl", "environment.json", "tensorboard", "hf", "log.txt"}
    assert {path.name for path in run.iterdir()} == names


def test_the_environment_is_written_down(finished: Finished) -> None:
    environment = json.loads((finished[0] / "environment.json").read_text())
    assert environment["trusted"] == []
    assert environment["variables"]["MALLOC_TRIM_THRESHOLD_"] == str(2**31 - 1)
    found = environment["cpu_matmul"]
    assert found["setting"] == "auto"
    exact, faster = found["error"] <= 1e-6, found["speedup"] >= 1.25
    assert found["library"] == ("onednn" if exact and faster else "default")
    assert f"products on the CPU: {found['library']} (auto: oneDNN is " in (finished[0] / "log.txt").read_text()
    assert environment["mesh"]["tp"] == environment["world"] == 2
    assert (environment["plugins"], environment["plugins_digest"]) == tuple(load_plugins().digest())


def test_the_exported_checkpoint_has_the_held_out_loss_of_the_run(finished: Finished, module_recipe: Path) -> None:
    run, _ = finished
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    text = module_recipe.with_name("text.txt").read_text()
    ids = AutoTokenizer.from_pretrained(run / "hf")(text)["input_ids"][-1200:]
    windows = torch.tensor([ids[start : start + 33] for start in range(0, 37 * 32, 32)])
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert loss.item() == pytest.approx(steps(run)[-1]["eval_loss"], abs=1e-5)


def test_the_resolved_recipe_trains_the_same_again(finished: Finished, tmp_path: Path) -> None:
    again = hp_train(finished[0] / "recipe.yaml", "--set", "mesh.tp=1", run=tmp_path / "again")
    assert again.returncode == 0, again.stderr
    losses = [line["loss"] for line in steps(finished[0])]
    assert [line["loss"] for line in steps(tmp_path / "again")] == pytest.approx(losses, abs=1e-3)


def test_sigterm_ends_the_run_after_a_whole_step_and_exports(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(recipe, "--set", "mesh.tp=2", "--set", "checkpoint.export_hf=true", run=run) as job:
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=HANG_S)
        assert job.returncode == 0, err
    last = steps(run)[-1]["step"]
    end = out.splitlines()[-1]
    assert end.startswith(f"stopped on request after step {last} of 100000: loss ")
    assert ", no held-out loss: a run that is stopped does not evaluate; Hugging Face checkpoint in " in end
    assert told(err) == "hp: stopping after the current step; once more stops at once\n"
    assert (run / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("phase", "number"), [(PHASES[0], signal.SIGTERM), (PHASES[1], signal.SIGINT), (PHASES[2], signal.SIGTERM)]
)
def test_a_signal_before_the_first_step_ends_the_job_at_once(
    recipe: Path, tmp_path: Path, phase: str, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    command = [*HP, "train", str(recipe), "--run-dir", str(run), "--set", "mesh.tp=2", *MANY_STEPS]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        while (line := job.stderr.readline().rstrip()) != phase:
            assert line in PHASES
        job.send_signal(number)
        out, err = job.communicate(timeout=HANG_S)
    assert (job.returncode, out, told(err)) == (130, "", "hp: interrupted before the first step: nothing was trained\n")
    assert not run.exists()
    assert not processes_with(str(run))


def processes_with(argument: str) -> list[Path]:
    """Return the processes that were started with ``argument``."""
    lines = {folder: folder / "cmdline" for folder in Path("/proc").glob("[0-9]*")}
    return [folder for folder, line in lines.items() if argument in _read(line)]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def test_a_second_signal_ends_the_job_in_the_middle_of_a_step(recipe: Path, tmp_path: Path) -> None:
    with training(recipe, "--set", "mesh.tp=2", run=tmp_path / "run") as job:
        ranks = ranks_of(job)
        os.kill(ranks[1], signal.SIGSTOP)  # so that no step ends any more
        job.send_signal(signal.SIGTERM)
        assert job.stderr is not None
        while "stopping" not in job.stderr.readline():
            pass
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=HANG_S)
    assert (job.returncode, told(err)) == (
        1,
        "hp: error[HP702]: the job was ended by a second signal, in the middle of a step\n",
    )
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_killed_rank_is_named_in_one_line_and_no_rank_is_left(recipe: Path, tmp_path: Path) -> None:
    with training(recipe, "--set", "mesh.dp_shard=2", run=tmp_path / "run") as job:
        ranks = ranks_of(job)
        os.kill(ranks[1], signal.SIGKILL)
        _, err = job.communicate(timeout=HANG_S)
    assert (job.returncode, told(err)) == (
        1,
        "hp: error[HP702]: rank 1 was killed by SIGKILL. fix: if the system ran out of memory (dmesg tells), lower"
        " train.micro_batch_size or train.sequence_length\n",
    )
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_full_disk_is_one_line(recipe: Path, tmp_path: Path) -> None:
    # rank 0 finds that it cannot write the plan; the other one must not tell about the lost connection
    run, hook = tmp_path / "run", tmp_path / "sitecustomize.py"
    hook.write_text("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n")
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    result = hp_train(recipe, "--set", "mesh.tp=2", run=run, **environment)
    assert (result.returncode, told(result.stderr)) == (
        1,
        f"hp: error[HP704]: {run}/plan.json cannot be written: File too large."
        " fix: free space there, or choose another place with --run-dir\n",
    )
    assert not (run / "plan.json").exists()


def test_torchrun_starts_the_ranks_as_well(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = tmp_path / "hp"
    script.write_text("import sys\nfrom hp_core.cli.main import main\nsys.exit(main())\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    arguments = ["train", str(recipe), "--set", "mesh.tp=2", "--run-dir", str(run)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*command, *arguments], env=environ, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert result.returncode == 0, result.stderr
    assert [line["step"] for line in steps(run)] == [1, 2, 3, 4, 5]


def lone_rank(recipe: Path, run: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``hp train`` as a process that some launcher started as rank 0 of 1."""
    return hp_train(recipe, run=run, RANK="0", WORLD_SIZE="1", **environment)


def test_a_rank_without_an_address_says_how_to_start_the_job(recipe: Path, tmp_path: Path) -> None:
    result = lone_rank(recipe, tmp_path / "run")
    assert (result.returncode, result.stderr) == (
        1,
        "hp: error[HP707]: the rank cannot find the others: Error initializing torch.distributed using env:// rendezvous:"
        " environment variable MASTER_ADDR expected, but not set. fix: start the job with hp train, or with torchrun\n",
    )


def test_a_rank_whose_port_is_in_use_says_so(recipe: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = lone_rank(recipe, tmp_path / "run", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert (result.returncode, result.stderr.splitlines()[-1]) == (
        1,
        f"hp: error[HP703]: port {port} is in use. fix: set MASTER_PORT (torchrun --master-port) to a free one",
    )


def refusal(recipe: Path, *arguments: str, tmp_path: Path) -> str:
    """Return the line of the error that ends ``hp train`` before a process starts and before a run directory is made."""
    with pytest.raises(HPError) as error:
        main([str(recipe), "--run-dir", str(tmp_path / "run"), *arguments], load_plugins())
    assert not (tmp_path / "run").exists()
    return error.value.line


def test_a_port_in_use_is_refused(recipe: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = refusal(recipe, "--port", str(port), tmp_path=tmp_path)
    assert line == f"hp: error[HP703]: port {port} is in use. fix: choose another --port, or none for a free one"


def test_a_text_that_is_too_short_is_refused(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    assert refusal(recipe, tmp_path=tmp_path) == (
        f"hp: error[HP711]: the text of {tmp_path}/text.txt has 5 tokens for training (5 in all); expected 257 or more:"
        " train.global_batch_size 8 x train.sequence_length 32 + 1. fix: add text, or lower one of the two"
    )


def test_a_mesh_of_another_size_is_refused(recipe: Path, tmp_path: Path) -> None:
    line = refusal(recipe, "--nproc", "3", "--set", "mesh.tp=2", tmp_path=tmp_path)
    assert line.startswith("hp: error[HP501]: ")


def test_a_batch_that_does_not_divide_is_refused(recipe: Path, tmp_path: Path) -> None:
    assert refusal(recipe, "--set", "mesh.dp_shard=3", tmp_path=tmp_path) == (
        "hp: error[HP502]: train.global_batch_size (8) must be divisible by dp_replicate * dp_shard *"
        f" train.micro_batch_size (3 * 2). {recipe}:23. mesh: dp_replicate=1 dp_shard=3 pp=1 cp=1 tp=1 ep=1."
        " fix: use a multiple of 6"
    )


def test_what_the_planner_refuses_is_refused_before_a_process_starts(recipe: Path, tmp_path: Path) -> None:
    assert refusal(recipe, "--set", "mesh.tp=8", tmp_path=tmp_path).startswith("hp: error[HP502]: ")


def test_a_device_that_is_not_there_is_refused(recipe: Path, tmp_path: Path) -> None:
    assert refusal(recipe, "--set", "device=cuda", tmp_path=tmp_path) == (
        "hp: error[HP708]: device is 'cuda' and the job has 1 ranks, but this machine has 0 such devices."
        " fix: set device: cpu, use a smaller mesh, or start the job on more machines with torchrun"
    )


@pytest.mark.skipif(hasattr(torch, "npu"), reason="torch has NPUs here")
def test_a_device_that_torch_does_not_know_here_is_refused(recipe: Path, tmp_path: Path) -> None:
    assert refusal(recipe, "--set", "device=npu", tmp_path=tmp_path) == (
        "hp: error[HP708]: torch has no device 'npu' here; expected its backend to be installed, and loaded when torch is "
        "imported. fix: pip install 'hp-npu[npu]', or set device: cpu"
    )


def test_a_recipe_that_freezes_everything_is_refused(recipe: Path, tmp_path: Path) -> None:
    line = refusal(recipe, "--set", "freeze=['*']", tmp_path=tmp_path)
    assert line == (
        "hp: error[HP514]: there is nothing to train: freeze and the overrides freeze all 25 parameters;"
        " expected one that is trained. --set freeze=['*']. fix: narrow the patterns under freeze"
    )


def test_a_launcher_that_numbers_its_processes_badly_is_named(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert refusal(recipe, tmp_path=tmp_path) == (
        "hp: error[HP707]: the environment variable WORLD_SIZE is 'x'; expected a number from 1."
        " fix: start the job with hp train, or with torchrun"
    )


def test_nproc_under_another_launcher_is_refused(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refusal(recipe, "--nproc", "4", tmp_path=tmp_path) == (
        "hp: error[HP707]: --nproc is 4, but this process was started as one of 2 (WORLD_SIZE)."
        " fix: leave --nproc to torchrun's --nproc-per-node"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: recipe"),
        (["r.yaml", "--nproc", "0"], "argument --nproc: --nproc is '0'; expected 1 or more (up to 9 digits)"),
        (["r.yaml", "--nproc", "-3"], "argument --nproc: --nproc is '-3'; expected 1 or more (up to 9 digits)"),
        (
            ["r.yaml", "--nproc", "9" * 5000],
            f"argument --nproc: --nproc is '{'9' * 40}...'; expected 1 or more (up to 9 digits)",
        ),
        (["r.yaml", "--port", "9" * 5000], f"argument --port: --port is '{'9' * 40}...'; expected 0 to 65535"),
        (["r.yaml", "--port", "x"], "argument --port: --port is 'x'; expected 0 to 65535"),
    ],
)
def test_a_command_line_that_cannot_be_understood_is_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments, load_plugins())
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"hp train: error: {text}"


def test_ranks_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [threads_per_rank(1), threads_per_rank(cores), threads_per_rank(2 * cores)] == [cores, 1, 1]
