"""A soak: training runs of all methods on a few ranks, in which faults happen at random but seeded moments.

    python -m soak --faults 1200 --seed 0 --out soak.jsonl
    python -m soak --replay 0:17

An *episode* is one training run that is restarted until it is complete. Each start of its ranks is an *attempt*: it
resumes from the newest checkpoint, goes through a few harmless faults, which it must survive with the same bits as an
undisturbed run, and then through a fault that ends it. Every fault gets one line of JSON with the checks that it passed
and a verdict. The verdict is "ok" only if each check that its kind requires was made and passed.

    rows.py      the methods, their task and what each of them promises
    plan.py      the random schedule, a pure function of seed and episode
    rank.py      what one rank runs, and the faults that it causes itself (harm.py)
    job.py       starts the ranks of an attempt, causes the other faults, collects what the ranks report
    judge.py     the checks and verdicts (names.py: which ranks an error accuses)
    episode.py   attempts one after another, undisturbed runs to compare with, what is left behind (leftovers.py)
    summary.py   counts and times over all faults
"""
