"""Train a policy: warm up on single decisions, then learn from attempts at tasks.

    python launch/train.py --config=configs/stepo.py [--workdir=DIR] [--config.KEY=VALUE ...]

The same command continues a stopped run. Hops 1-6 of a trajectory (task to stored group) run in a service, here in
threads beside the learner or in processes of their own (launch/rollout.py, launch/serve.py); hops 7-10 are this page.
"""

import sys
import time

import parts
import policy_server

from cuajax import metrics, program
from cuajax.config import Settings
from cuajax.data.store import Store


def main(config: Settings, workdir: str) -> int:
    # ------------------------------------------------------------------------ check, before devices are touched
    began = time.time()
    suite, harness = parts.suite(config), parts.harness(config)
    finals = parts.held_out(config, suite, config.eval.final_tasks, start=parts.FINAL)
    held_out = parts.held_out(config, suite, config.eval.tasks, start=0)
    parts.check_prompts(config, harness, [*finals, *held_out])
    spec, credit = parts.pack_spec(harness, config, config.data), parts.credit(config)
    run_dir = program.prepare_run_dir(workdir or f"runs/{config.name}", config)
    lease = parts.hold(run_dir / "experience")
    metrics.setup_logging(run_dir)
    sys.setswitchinterval(1e-3)  # seconds: learner, server and rollouts share this process; 5 ms is an answer's time

    import jax
    import learner as learning
    import warmup

    from cuajax.checkpoint import Checkpoints, Preemption
    from cuajax.data.pipeline import experience, rebase
    from cuajax.models import policy, presets

    # ------------------------------------------------------------------------------- policy, optimizer, mesh
    vocabulary = parts.tokenizer(harness).vocab_size
    cfg = presets.get(config.policy.preset, vocab_size=vocabulary, dtype=config.policy.dtype)
    objective, learner = learning.objective(config), learning.Learner.of(config, cfg)
    rule = learning.make_optimizer(config.optimizer, learner.axes, updates=config.train.updates * config.train.epochs)
    train_step, score = learner.train_step(objective.loss, rule), learner.score_step(rule)
    state = learner.begin(jax.jit(policy.init, static_argnums=1)(jax.random.key(config.seed), cfg), rule)

    # --------------------------------------------------------------------------------------- restore or begin
    checkpoints = Checkpoints(
        run_dir / "checkpoints", keep_last=config.checkpoint.keep, keep_best=config.checkpoint.keep_best,
        metric="success",
    )  # fmt: skip
    store = Store.open(
        str(run_dir / "experience"), create=True, fence=lease.fence, budget_bytes=config.data.store_budget
    )
    cursor, reference, replay = {"update": 0, "config": program.fingerprint(config)}, None, config.rollout.replay
    found = checkpoints.latest()
    if found is not None:
        saved = checkpoints.restore(*learning.items(state, state.params if objective.needs_ref else None), step=found)
        (state, reference), cursor = learning.restored(saved), saved.data
    elif config.policy.init:
        state = learner.begin(learning.params_of(config.policy.init, like=state.params), rule)
    start, best = cursor["update"], cursor.get("best", 0.0)
    writer = metrics.Writer(run_dir, restored=start if found is not None else -1)

    # ---------------------------------------------------------------------------------------- serve the policy
    version = store.new_version()
    serving = policy_server.of(config, harness, run_dir, cfg=cfg, current=lambda: (state.params, version))

    def publish(params) -> int:
        number = store.new_version()
        serving.publish(params, number)
        return number

    def renew() -> None:
        serving.renew(state.params, version)  # a policy server that was restarted has older weights

    def leave(status: int) -> int:
        writer.close()
        serving.stop()
        store.close()
        lease.release()
        return status

    def evaluate(tasks):
        return parts.run_tasks(serving.connect, suite, tasks, harness=harness, temperature=config.eval.temperature)

    # ------------------------------------------------------------------------- warm-up: grounding, supervised
    if found is None:
        if config.warmup.steps:
            params = warmup.warm_up(
                config, harness, state.params, learner=learner, connect=serving.connect, publish=publish,
                writer=writer, run_dir=run_dir,
            )  # fmt: skip
            if params is None:
                checkpoints.close()
                return leave(learning.PREEMPTED)
            state = learner.begin(params, rule)
            version = publish(state.params)
        best = held = parts.scores(evaluate(held_out), held_out)["success"]
        cursor |= {"version": version, "best": best, "success": held}
        opening = parts.evaluation_row(parts.scores(evaluate(finals), finals))
        writer.write(0, opening | {"seconds/total": time.time() - began})
        print(f"reinforcement begins at held-out success {opening['eval/success']:.3f}", file=sys.stderr)
        first = state.params if objective.needs_ref else None  # only to be saved: the step donates it
        learning.keep_start(run_dir, store, state, cursor, reference=first)
        learning.save(checkpoints, store, state, cursor, reference=first)
        checkpoints.wait()
        warmup.forget(run_dir)

    # ------------------------------------------------------------ experience: attempts in, packed batches out
    rules = learning.rules(config, first_version=version)
    source = Store.open(replay) if replay else store
    progress = parts.Progress(store, seq=cursor.get("pipeline", {"seq": 0})["seq"], shared=not config.rollout.here)
    batches = iter(experience(
        source, credit, spec=spec, rules=rules, shard=(jax.process_index(), jax.process_count()),
        prefetch=config.data.prefetch, timeout=1.0, dropped=progress.drop,
    ))  # fmt: skip
    if "pipeline" in cursor:
        batches.set_state(cursor["pipeline"] if replay else rebase(cursor["pipeline"], version))
    actors = None
    seat = parts.hold(run_dir / "leases" / "rollout") if config.rollout.here and not replay else None
    if seat is not None:
        actors = parts.actors(config, suite, harness, connect=serving.connect, store=store, progress=progress)
        actors.start()

    # ------------------------------------------------------------------------------------------------ the loop
    def enough() -> bool:
        success = cursor.get("success")  # None unless the newest update was evaluated
        return success is not None and success >= config.eval.enough

    account, update, status = learning.Account(serving, actors), start, 0
    with Preemption() as preemption, metrics.ProgressLine(config.train.updates, done=start) as line:
        while update < config.train.updates and not (preemption.requested or status or enough()):
            with account.clock("wait for groups"):
                batch, info = learning.next_batch(batches, actors, preemption, store=store, waiting=renew)
            if batch is None:
                break
            update += 1
            with account.clock("step"):
                batch = learner.place(batch)
                if objective.needs_ref:
                    begins = learning.newest_round(source, info["seqs"]) > cursor.get("round", 0)
                    cursor["round"] = max(cursor.get("round", 0), learning.newest_round(source, info["seqs"]))
                    reference = learning.round_reference(reference, state, begins)
                    batch = batch._replace(ref_logp=score(reference, batch))
                if objective.needs_prox:
                    batch = batch._replace(prox_logp=score(state.params, batch))
                for _ in range(config.train.epochs):
                    state, report = train_step(state, batch)
                learning.check_skipped(report, config.train.skip_limit, checkpoints=checkpoints)  # waits for the device
            with account.clock("publish"):
                due = update % config.train.publish_every == 0
                version = publish(state.params) if due and not replay else version
                progress.advance(batches.get_state()["seq"], published=due)
            row = account.row(report, info, version)

            if config.eval.every and update % config.eval.every == 0 and not replay:
                with account.clock("evaluate"):
                    row |= parts.evaluation_row(parts.scores(evaluate(held_out), held_out))
                best = max(best, row["eval/success"])
                status = learning.COLLAPSED if row["eval/success"] < config.eval.collapse * best else 0
            row["seconds/total"] = time.time() - began
            line.update(update, writer.write(update, row))
            cursor |= {"update": update, "version": version, "best": best, "pipeline": batches.get_state(),
                       "success": row.get("eval/success")}  # fmt: skip
            if update % config.checkpoint.every == 0 or "eval/success" in row or preemption.requested:
                learning.save(checkpoints, store, state, cursor, reference=reference)

    # ----------------------------------------------------------------------------- save, stop, score, report
    if update > start:
        learning.save(checkpoints, store, state, cursor, reference=reference)
    checkpoints.close()
    batches.close()
    if actors is not None and seat is not None:
        actors.stop(drain=False)
        seat.release()
    if preemption.requested:
        status = learning.PREEMPTED
    else:
        import result

        if replay and finals:
            serving.publish(state.params, store.new_version())
        result.tell(run_dir, config, source, trajectories=evaluate(finals), tasks=finals, seconds=time.time() - began)
    return leave(status)


if __name__ == "__main__":
    program.run(main, doc=__doc__ or "", workdir="")
