"""Where features meet a resume: refills, outages, overdue and mastered groups, evaluations, changed settings."""

import asyncio
import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HERE, RECIPE, assert_same_metrics, kitae, rows, run_toy, toy_config
from safetensors.torch import load_file
from test_async import check_ledger
from test_resume import rollouts_written

from kitae.errors import ConfigError, DataError, StoreError, VerifierError
from kitae.models.load import find_model
from kitae.observe.observer import Bystander, Silent
from kitae.rl import evaluations as run_evaluations
from kitae.rl.loops import Pipeline
from kitae.run import train_run
from kitae.run.recompute_step import replay
from kitae.store.checkpoints import Checkpoints
from kitae.store.journal import Journal
from kitae.store.run_folder import Result, RunStore
from kitae.trainer.learner import Learner


def go_on(folder: Path, *overrides: str, checkpoint: str | None = None) -> Result:
    store = RunStore.open(folder / "toy-001", overrides)
    return train_run.go_on(store, Bystander(Silent()), checkpoint)


class Crash(Exception):
    pass


@contextmanager
def crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Iterator[None]:
    """Nothing is saved when this step is about to be learnt."""
    learn = Learner.learn

    def fail(self: Learner, now: int, *arguments: Any, **settings: Any) -> Any:
        if now == step:
            raise Crash
        return learn(self, now, *arguments, **settings)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Learner, "learn", fail)
        yield


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_ends_with_the_step_that_reaches_its_time_and_goes_on_with_more(tmp_path: Path, staleness: int) -> None:
    settings = ("training.steps=5", f"pipeline.max_staleness={staleness}", "eval.prompts=4", "checkpoint.every=4")
    short = run_toy(tmp_path, *settings, "training.minutes=1e-6")  # no step is as short
    assert (short.step, short.stopped_by) == (1, None)
    assert short.model.is_dir() and (short.folder / "checkpoints" / "step-000001").is_dir()
    assert [row["step"] for row in rows(short.folder) if row["kind"] == "eval"] == [0, 1]
    check_ledger(short.folder, toy_config(tmp_path, *settings))
    assert train_run.resume(short.folder, Bystander(Silent())).step == 1  # nothing is left to do
    assert train_run.resume(short.folder, Bystander(Silent()), ["training.minutes=60"]).step == 5
    check_ledger(short.folder, toy_config(tmp_path, *settings))
    if not staleness:
        whole = run_toy(tmp_path, *settings)
        ours, theirs = ([r["reward"] for r in rows(f.folder) if r["kind"] == "step"] for f in (short, whole))
        assert ours == theirs
        ours, theirs = (load_file(run.model / "model.safetensors") for run in (short, whole))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_killed_run_whose_time_is_up_trains_what_it_has_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("training.steps=5", "eval.prompts=0", "checkpoint.every=2")
    with crash_at(monkeypatch, 4):
        run_toy(tmp_path, *settings)
    ended = go_on(tmp_path, "training.minutes=1e-6")  # step 3 is in the journal, and in no checkpoint
    assert ended.step == 3 and (ended.folder / "checkpoints" / "step-000003").is_dir()


def events(run: Path, kind: str) -> list[str]:
    journal = Journal(run / "journal.sqlite", read_only=True)
    found = [detail for _, what, detail in journal.events() if what == kind]
    journal.close()
    return found


def score_file(folder: Path, body: str) -> str:
    (folder / "own.py").write_text(f"import zlib\n\ndef score(response, reference, context):\n    {body}\n")
    return f"verifier.name={folder / 'own.py'}:score"


PARITY = "return float(len(response) % 2)"
REFILL = (
    "algorithm.filter=zero-variance",
    "pipeline.refill=3",
    "pipeline.refill.most=5",
    "training.group_size=3",
    "training.steps=6",
    "checkpoint.every=2",
    "sampling.max_tokens=4",
    "verifier.check_gold=false",
    "eval.prompts=0",
)


@pytest.mark.parametrize(
    ("staleness", "oversample"), [(2, 1), *(pytest.param(0, x, marks=pytest.mark.slow) for x in (1, 2.5))]
)
def test_an_outage_under_refill_is_survived(
    staleness: int, oversample: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that could not be judged were replaced; repaired, they are judged again, and replacements are spare."""
    longer = "training.steps=9"  # than what may be judged ahead of the crash
    settings = (
        score_file(tmp_path, PARITY),
        *REFILL,
        longer,
        f"pipeline.max_staleness={staleness}",
        f"pipeline.refill.oversample={oversample}",
    )
    with crash_at(monkeypatch, 4):
        run_toy(tmp_path, *settings)
    score_file(tmp_path, "raise RuntimeError('service is down')")
    with pytest.raises(VerifierError, match="service is down"):
        go_on(tmp_path)
    with pytest.raises(VerifierError, match="service is down"):
        go_on(tmp_path)
    score_file(tmp_path, PARITY)
    result = go_on(tmp_path)
    check_ledger(result.folder, toy_config(tmp_path, *settings))
    journal = Journal(result.folder / "journal.sqlite", read_only=True)
    reasons = Counter(reason for _, _, _, reason in journal.groups())
    journal.close()
    assert reasons["spare"] > 0


@pytest.mark.parametrize(
    ("staleness", "oversample"), [(1, 2), *(pytest.param(k, 1, marks=pytest.mark.slow) for k in (0, 1, 3))]
)
def test_a_flaky_verifier_under_refill(
    staleness: int, oversample: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict that was missing is there the second time; the groups of a slot then are others than before."""
    flaky = f"""import os
    mark = os.path.join({str(tmp_path)!r}, str(zlib.crc32(repr((response, reference)).encode())))
    if zlib.crc32(response.encode()) % 3 == 0 and not os.path.exists(mark):
        open(mark, 'w').close()
        raise RuntimeError('not now')
    {PARITY}"""
    settings = (
        score_file(tmp_path, flaky),
        *REFILL,
        "verifier.max_error_share=1",
        f"pipeline.max_staleness={staleness}",
        f"pipeline.refill.oversample={oversample}",
    )
    with crash_at(monkeypatch, 2):
        run_toy(tmp_path, *settings)
    for step in (4, 4, 6):
        with crash_at(monkeypatch, step):
            go_on(tmp_path)
    result = go_on(tmp_path)
    check_ledger(result.folder, toy_config(tmp_path, *settings))


def test_overdue_groups_and_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (
        score_file(tmp_path, f"import time; time.sleep(0.3 * str(reference).startswith('1')); {PARITY}"),
        "verifier.workers=6",
        "verifier.check_gold=false",
        "pipeline.max_staleness=1",
        "pipeline.overdue=drop",
        "training.steps=8",
        "training.group_size=3",
        "checkpoint.every=3",
        "eval.prompts=0",
    )
    with crash_at(monkeypatch, 3):
        run_toy(tmp_path, *settings)
    for step in (3, 6, 8, 8):
        with crash_at(monkeypatch, step):
            go_on(tmp_path)
    result = go_on(tmp_path)
    fates = check_ledger(result.folder, toy_config(tmp_path, *settings))
    assert fates["trained"] + fates["dropped"] == 32 and fates["skipped"] > 0


def test_mastered_prompts_and_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On-policy, which prompts are asked after a resume is what it would have been: pass rates of groups that the run
    has not asked yet do not count."""
    data = tmp_path / "six.jsonl"
    data.write_text("".join(json.dumps({"question": f"p{i}", "answer": i}) + "\n" for i in range(6)))
    settings = (
        f"data.path={data}",
        score_file(tmp_path, "return 1.0 if reference < 3 else (len(response) % 2) / 2"),
        "verifier.check_gold=false",
        "pipeline.mastered_visits=0.3",
        "training.prompts_per_step=3",
        "training.steps=8",
        "training.group_size=2",
        "checkpoint.every=3",
        "eval.prompts=0",
    )
    whole = run_toy(tmp_path / "whole", *settings).folder
    parts = tmp_path / "parts"
    with crash_at(monkeypatch, 3):
        run_toy(parts, *settings)
    for step in (3, 6, 6):
        with crash_at(monkeypatch, step):
            go_on(parts)
    run = go_on(parts).folder
    check_ledger(run, toy_config(parts, *settings))
    asked = []
    for folder in (whole, run):
        journal = Journal(folder / "journal.sqlite", read_only=True)
        asked.append([(group, fate, reason) for group, _, fate, reason in journal.groups()])
        journal.close()
    assert asked[0] == asked[1] and any(reason == "mastered" for _, _, reason in asked[0])
    assert_same_metrics(run, whole)


def test_an_evaluation_that_was_lost_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("training.steps=6", "checkpoint.every=3", "eval.every=3", "eval.prompts=4")
    whole = run_toy(tmp_path / "whole", *settings).folder

    async def fail(*_: Any) -> Any:
        raise Crash

    calls = []
    evaluate = run_evaluations.evaluate

    async def second_fails(*arguments: Any) -> Any:
        calls.append(0)
        return await (fail if len(calls) == 2 else evaluate)(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(run_evaluations, "evaluate", second_fails)
        run_toy(tmp_path, *settings)
    assert [r["step"] for r in rows(tmp_path / "toy-001") if r["kind"] == "eval"] == [0]
    assert_same_metrics(go_on(tmp_path).folder, whole)


@pytest.mark.parametrize("engine", ["native", pytest.param("process", marks=pytest.mark.slow)])
def test_ctrl_c_during_an_evaluation_beside_training(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops and saves; the evaluation is made when it goes on."""
    settings = (
        f"engine.kind={engine}",
        "pipeline.max_staleness=1",
        "training.steps=3",
        "sampling.max_tokens=200",
        "eval.every=1",
    )
    or_stop = Pipeline.or_stop

    async def while_it_evaluates(self: Pipeline, work: Any) -> Any:
        await self._settled()
        if self._evaluating is not None:
            await asyncio.sleep(0.02)
            assert not self._evaluating.done()
            self.stop()
        return await or_stop(self, work)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "or_stop", while_it_evaluates)
        result = run_toy(tmp_path, *settings)
    assert result.stopped_by and result.step == 1
    assert Checkpoints(result.folder / "checkpoints", 1).load()[0].step == 1
    go_on(tmp_path)
    found = [(r["kind"], r["step"]) for r in rows(result.folder)]
    assert found == [("eval", 0)] + [(kind, step) for step in range(1, 4) for kind in ("step", "eval")]
    check_ledger(result.folder, toy_config(tmp_path, *settings))


SLOW_VERDICT = "import time; time.sleep(60); return 1.0"


def test_responses_that_wait_for_a_verdict_are_saved(tmp_path: Path) -> None:
    """Complete responses are in the journal before they are judged: neither Ctrl-C nor kill -9 loses them."""
    own = score_file(tmp_path, SLOW_VERDICT)
    settings = (own, "verifier.check_gold=false", "eval.prompts=0", "training.steps=2", "verifier.timeout=90")
    process = kitae("train", str(RECIPE), f"run.dir={tmp_path}", *settings)
    run = tmp_path / "toy-001"
    deadline = time.time() + 100
    while rollouts_written(run) < 32:
        assert process.poll() is None and time.time() < deadline, process.printed()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.ended(timeout=60)
    journal = Journal(run / "journal.sqlite", read_only=True)
    before = {r.id: r.segments for g in range(4) for r in journal.rollouts(g)}
    assert len(before) == 32 and all(r.score and not r.score.valid for r in journal.rollouts(0))
    journal.close()
    score_file(tmp_path, PARITY)
    go_on(tmp_path)
    journal = Journal(run / "journal.sqlite", read_only=True)
    assert before == {r.id: r.segments for g in range(4) for r in journal.rollouts(g)}
    journal.close()


def test_the_second_ctrl_c_does_not_wait_for_the_step(tmp_path: Path) -> None:
    """The trainer's thread is in a step that takes a minute."""
    script = (
        "import time; from kitae.trainer.training_worker import Worker; from pathlib import Path\n"
        f"def learn(*_, **__): Path({str(tmp_path / 'learning')!r}).touch(); time.sleep(60)\n"
        "Worker.forward_backward = learn\n"
        "from kitae.cli.main import run; run()"
    )
    settings = (f"verifier.name={HERE / 'toy.py'}:digits", f"run.dir={tmp_path}", "eval.prompts=0")
    process = kitae("train", str(RECIPE), *settings, script=script)
    deadline = time.time() + 100
    while not (tmp_path / "learning").exists():
        assert process.poll() is None and time.time() < deadline, process.printed()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None, "the first one waits for the step"
    began = time.time()
    process.send_signal(signal.SIGINT)
    process.ended(timeout=50)
    assert time.time() - began < 45 and process.returncode == 130
    go_on(tmp_path, "training.steps=2")
    check_ledger(tmp_path / "toy-001", toy_config(tmp_path, "training.steps=2", "eval.prompts=0"))


@pytest.mark.sentinel
def test_a_finished_run_can_be_extended_and_changed(tmp_path: Path) -> None:
    whole = run_toy(tmp_path / "whole", "training.steps=6", "checkpoint.every=3", "eval.prompts=4").folder
    run_toy(tmp_path, "training.steps=3", "checkpoint.every=3", "checkpoint.keep=9", "eval.prompts=4")
    run = go_on(tmp_path, "training.steps=6").folder
    assert events(run, "changed") == ["after step 3: training.steps: was 3, is 6"]
    steps = [r for r in rows(run) if r["kind"] == "step"]
    expected = [r for r in rows(whole) if r["kind"] == "step"]
    assert [r["reward"] for r in steps] == [r["reward"] for r in expected]
    assert [r["step"] for r in rows(run) if r["kind"] == "eval"] == [0, 3, 6]
    go_on(tmp_path, "training.steps=7", "training.lr=1e-4")
    assert [r["lr"] for r in rows(run) if r["kind"] == "step"][5:] == [3e-3, 1e-4]
    assert replay(run, 7, print).difference == 0
    with pytest.raises(StoreError, match=r"step 5 cannot be computed again from step 3 .*training.lr: was 0.003"):
        replay(run, 5, print)
    with pytest.raises(ConfigError, match="this must not have changed"):
        go_on(tmp_path, "training.steps=8", checkpoint="step-000003")
    check_ledger(run, toy_config(tmp_path, "training.steps=7", "eval.prompts=4"))
    store = RunStore.open(run, ["training.steps=8"])  # what is forgotten had no other settings
    train_run.go_on(store, Bystander(Silent()), "step-000003", forget=True)
    (run / "checkpoints" / "step-000008").rename(tmp_path / "elsewhere")
    go_on(tmp_path)
    assert [r["lr"] for r in rows(run) if r["kind"] == "step"] == [3e-3] * 3 + [1e-4] * 5


def test_a_run_can_be_made_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had been issued for the steps that are left out is closed too."""
    settings = ("pipeline.max_staleness=3", "training.steps=9", "checkpoint.every=2", "eval.prompts=0")
    with crash_at(monkeypatch, 4):
        run_toy(tmp_path, *settings)
    run = go_on(tmp_path, "training.steps=3").folder
    fates = check_ledger(run, toy_config(tmp_path, *settings, "training.steps=3"))
    assert fates["trained"] == 12 and fates["skipped"] > 0


@pytest.mark.parametrize(
    "method",
    [
        "algorithm.preset=ppo",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("pipeline.max_staleness=3", "pipeline.overdue=drop")),
    ],
)
def test_all_steps_again_from_the_start(method: str, tmp_path: Path) -> None:
    """Past steps are trained on what they were trained on, to the same weights, and nothing is sampled again."""
    stale = ["pipeline.max_staleness=2"] if "overdue" in method else []
    settings = (*stale, method, "algorithm.filter=zero-variance", "training.steps=5", "checkpoint.every=2")
    run = run_toy(tmp_path, *settings, "eval.prompts=4").folder
    then, written = rows(run), rollouts_written(run)
    weights = load_file(run / "model" / "model.safetensors")
    go_on(tmp_path, checkpoint="start")
    assert rollouts_written(run) == written and rows(run) == then
    for name, tensor in load_file(run / "model" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name


def test_on_policy_stays_on_policy_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With refills, another step 1 than before would make the samples of version 1 those of other weights."""
    settings = (score_file(tmp_path, PARITY), *REFILL, "pipeline.refill.most=0.5", "checkpoint.every=9")
    with crash_at(monkeypatch, 3):
        run_toy(tmp_path, *settings)
    before = rows(tmp_path / "toy-001")
    run = go_on(tmp_path).folder
    assert rows(run)[:2] == before
    assert max(r["logp_gap_max"] for r in rows(run) if "logp_gap_max" in r) < 1e-3
    check_ledger(run, toy_config(tmp_path, *settings))


def test_steps_can_be_forgotten(tmp_path: Path) -> None:
    """What later weights had sampled is sampled again, by those that take their place; what was before stays."""
    settings = ("training.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "eval.prompts=0")
    run = run_toy(tmp_path, *settings, "training.lr=1e-2").folder
    journal = Journal(run / "journal.sqlite", read_only=True)
    before = [journal.rollouts(group) for group in range(24)]
    journal.close()
    (run / "checkpoints" / "step-000006").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="steps 5 to 6 come after the checkpoint and are trained again as they were"):
        go_on(tmp_path, "training.lr=1e-3")
    train_again = RunStore.open(run, ["training.lr=1e-3"])
    train_run.go_on(train_again, Bystander(Silent()), "step-000002", forget=True)
    journal = Journal(run / "journal.sqlite", read_only=True)
    after = [journal.rollouts(group) for group in range(24)]
    journal.close()
    assert after[:12] == before[:12], "of versions 0 to 2"
    assert all(a != b for a, b in zip(after[16:], before[16:], strict=True))
    assert [r["lr"] for r in rows(run)] == [1e-2] * 2 + [1e-3] * 4
    assert max(r["logp_gap_max"] for r in rows(run)) < 1e-3
    check_ledger(run, toy_config(tmp_path, *settings))


def test_a_prompt_that_the_template_refuses_is_skipped_and_counted(tmp_path: Path) -> None:
    found = find_model("tiny")
    assert found is not None
    model = shutil.copytree(found, tmp_path / "model")
    refusal = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template = f"{{% for m in messages %}}{refusal}{{{{ m.content }}}}{{% endfor %}}"
    (model / "chat_template.jinja").write_text(template)
    roles = ["user", "tool", "user", "user"]
    rows_of = [{"question": [{"role": role, "content": f"p{i}"}], "answer": "1"} for i, role in enumerate(roles)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    shutil.copy(data, held_out := tmp_path / "held_out.jsonl")
    settings = (
        f"data.path={data}",
        f"data.eval_path={held_out}",
        f"model.path={model}",
        "training.steps=2",
        "eval.prompts=4",
    )
    run = run_toy(tmp_path, *settings).folder
    assert any("refuses the roles ['tool']: no tools" in text for text in events(run, "bad prompt"))
    journal = Journal(run / "journal.sqlite", read_only=True)
    assert Counter(fate for _, _, fate, _ in journal.groups()) == {"trained": 6, "dropped": 2}
    journal.close()
    assert [r["errors"] for r in rows(run) if r["kind"] == "eval"] == [1, 1]


def test_no_checkpoint_of_weights_that_nobody_has_trained(tmp_path: Path) -> None:
    run = run_toy(tmp_path, "training.steps=2", "checkpoint.every=1", "checkpoint.keep=9", "eval.prompts=0").folder
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_shorter_and_then_longer_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("pipeline.max_staleness=3", "training.steps=9", "checkpoint.every=2", "eval.prompts=0")
    with crash_at(monkeypatch, 4):
        run_toy(tmp_path, *settings)
    go_on(tmp_path, "training.steps=3")
    run = go_on(tmp_path, "training.steps=6", "pipeline.stall_limit=8").folder
    check_ledger(run, toy_config(tmp_path, *settings, "training.steps=6"))


def test_killed_between_a_mastered_prompt_and_the_one_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "six.jsonl"
    data.write_text("".join(json.dumps({"question": f"p{i}", "answer": i}) + "\n" for i in range(6)))
    settings = (
        f"data.path={data}",
        score_file(tmp_path, "return 1.0 if reference < 3 else (len(response) % 2) / 2"),
        "verifier.check_gold=false",
        "pipeline.mastered_visits=0.3",
        "training.prompts_per_step=3",
        "training.steps=6",
        "training.group_size=2",
        "checkpoint.every=3",
        "eval.prompts=0",
        "pipeline.stall_limit=8",
    )
    add = Journal.add_prompt

    async def dies(self: Journal, group: int, prompt: Any, version: int, slot: int, skipped: str = "") -> None:
        await add(self, group, prompt, version, slot, skipped)
        if skipped:
            raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Journal, "add_prompt", dies)
        run_toy(tmp_path, *settings)
    run = go_on(tmp_path).folder
    check_ledger(run, toy_config(tmp_path, *settings))


def test_killed_while_steps_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("training.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "eval.prompts=0")
    run = run_toy(tmp_path, *settings).folder

    def dies(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Checkpoints, "forget_after", dies)
        store = RunStore.open(run)
        train_run.go_on(store, Bystander(Silent()), "step-000002", forget=True)
    go_on(tmp_path, "training.steps=7")
    check_ledger(run, toy_config(tmp_path, *settings, "training.steps=7"))


def test_a_slot_that_is_overdue_before_its_prompt_is_issued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed loop looks for a prompt that is not mastered, or waits for the disk, while batches go by."""
    settings = (
        "pipeline.max_staleness=1",
        "pipeline.overdue=drop",
        "training.steps=6",
        "eval.prompts=0",
        "checkpoint.every=9",
        "training.group_size=2",
        "training.prompts_per_step=2",
    )
    add = Journal.add_prompt

    async def slow(self: Journal, group: int, *rest: Any) -> None:
        await asyncio.sleep(3 if group == 6 else 0)
        await add(self, group, *rest)

    monkeypatch.setattr(Journal, "add_prompt", slow)
    run = run_toy(tmp_path, *settings).folder
    check_ledger(run, toy_config(tmp_path, *settings))


@pytest.mark.parametrize("oversample", [pytest.param(1, marks=pytest.mark.slow), 1.5])
def test_refills_of_a_step_are_limited_across_crashes(
    oversample: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (
        f"pipeline.refill.oversample={oversample}",
        score_file(tmp_path, "return 0.5"),
        "algorithm.filter=zero-variance",
        "pipeline.refill=1",
        "training.group_size=2",
        "training.steps=2",
        "sampling.max_tokens=4",
        "verifier.check_gold=false",
        "eval.prompts=0",
    )
    whole = run_toy(tmp_path / "whole", *settings).folder
    with crash_at(monkeypatch, 1):
        run_toy(tmp_path, *settings)
    with crash_at(monkeypatch, 1):
        go_on(tmp_path)
    run = go_on(tmp_path).folder
    counts = []
    for folder in (whole, run):
        journal = Journal(folder / "journal.sqlite", read_only=True)
        counts.append([len(journal.groups(step)) for step in (1, 2)])
        journal.close()
    assert counts[0] == counts[1]


def test_given_up_and_killed_before_the_journal_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that a batch went without is too old for the next one, also when its verdict is there by then."""
    first, hurry = tmp_path / "first", tmp_path / "fast"
    slow = f"""import os, time
    try:
        with open({str(first)!r}, "x") as file:
            file.write(str(reference))
    except FileExistsError:
        pass
    while open({str(first)!r}).read() == str(reference) and not os.path.exists({str(hurry)!r}):
        time.sleep(0.02)
    {PARITY}"""
    settings = (
        score_file(tmp_path, slow),
        "verifier.workers=16",
        "verifier.timeout=100",
        "verifier.check_gold=false",
        "pipeline.max_staleness=1",
        "pipeline.overdue=drop",
        "training.steps=8",
        "training.group_size=2",
        "checkpoint.every=1",
        "eval.prompts=0",
    )

    async def crash(*_: Any) -> None:
        while not (tmp_path / "toy-001" / "checkpoints" / "step-000003").exists():
            await asyncio.sleep(0.01)
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Journal, "skip_slot", crash)
        run_toy(tmp_path, *settings)
    journal = Journal(tmp_path / "toy-001" / "journal.sqlite", read_only=True)
    given_up = [group for slot in journal.pending() if slot.oldest == 0 for group in slot.groups]
    journal.close()
    assert given_up, "given up, and not known"  # one; on a busy machine another verdict may be as late
    hurry.touch()
    run = go_on(tmp_path).folder
    check_ledger(run, toy_config(tmp_path, *settings))
    journal = Journal(run / "journal.sqlite", read_only=True)
    fates = [(fate, why) for group, _, fate, why in journal.groups() if group in given_up]
    journal.close()
    assert fates == [("skipped", "overdue")] * len(given_up)


def test_a_shorter_run_does_not_sample_what_nobody_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last step is trained, rollouts of spare slots are waited for: Ctrl-C is not heard, nobody watches."""
    settings = (
        score_file(tmp_path, PARITY),
        "verifier.check_gold=false",
        "verifier.workers=16",
        "training.group_size=2",
        "pipeline.max_staleness=3",
        "training.steps=9",
        "checkpoint.every=2",
        "eval.prompts=0",
    )
    with crash_at(monkeypatch, 4):
        run_toy(tmp_path, *settings)
    journal = Journal(tmp_path / "toy-001" / "journal.sqlite")
    for group in (g for p in journal.pending() for g in p.groups):  # as if they had just been issued
        journal._reader.execute("DELETE FROM rollouts WHERE group_id = ?", (group,))
    before = journal.counts()["rollouts"]
    journal.close()
    score_file(tmp_path, "import time; time.sleep(4); return 1.0")
    run = go_on(tmp_path, "training.steps=3").folder
    journal = Journal(run / "journal.sqlite", read_only=True)
    after = journal.counts()["rollouts"]
    journal.close()
    assert after == before


def test_a_stop_gives_no_slot_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run suspends, the batch that it was waiting for is still taken: slots go, and nothing is trained."""
    settings = (
        score_file(tmp_path, f"import time; time.sleep(1.5 if str(reference).startswith('1') else 0.2); {PARITY}"),
        "verifier.workers=16",
        "verifier.check_gold=false",
        "pipeline.max_staleness=1",
        "pipeline.overdue=drop",
        "training.steps=6",
        "training.group_size=2",
        "checkpoint.every=9",
        "eval.prompts=0",
    )
    settle = Pipeline._settle

    async def stop_soon(self: Pipeline, *arguments: Any) -> None:
        await settle(self, *arguments)
        asyncio.get_running_loop().call_later(0.05, self.stop)

    monkeypatch.setattr(Pipeline, "_settle", stop_soon)
    result = run_toy(tmp_path, *settings)
    assert result.after is None and result.step == 1
    journal = Journal(result.folder / "journal.sqlite", read_only=True)
    found = journal.groups(2)
    journal.close()
    assert found == []


def test_prompts_that_were_changed_since_the_run_began_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    asked = [{"question": f"Say {i}", "answer": str(i)} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))
    settings = (f"data.path={file}", "verifier.check_gold=false", "eval.prompts=0", "training.steps=3")
    with crash_at(monkeypatch, 3):
        run_toy(tmp_path, *settings, "checkpoint.every=2")
    file.write_text("".join(json.dumps({**row, "answer": "7"}) + "\n" for row in asked))
    with pytest.raises(DataError, match=r"must be those that the run began with, but .*prompts\.jsonl or what"):
        go_on(tmp_path)
    with pytest.raises(DataError, match=r"--from start --forget, or in a new run"):
        go_on(tmp_path, checkpoint="start")
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))
    assert go_on(tmp_path).step == 3, "put back, they are fine"
    file.write_text("".join(json.dumps({**row, "answer": "7"}) + "\n" for row in asked))
    store = RunStore.open(tmp_path / "toy-001")
    assert train_run.go_on(store, Bystander(Silent()), "start", forget=True).step == 3
    assert go_on(tmp_path, "training.steps=4").step == 4, "now these are what it began with"
