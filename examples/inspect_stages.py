"""See what each stage of the compiler makes of a spec: `python examples/inspect_stages.py [SPEC]`, a few seconds.

The same from the command line: `ttmdsl show gated_delta_net --after lower`, and TTM_DUMP=FOLDER writes every stage of
whatever is compiled into a folder.
"""

import sys

from ttmdsl.explain import explain
from ttmdsl.loader import read
from ttmdsl.options import Options
from ttmdsl.pipeline import STAGES, run, show


def main() -> None:
    text, filename = read(sys.argv[1] if len(sys.argv) > 1 else "gated_delta_net")
    job = run(text, filename, {}, Options.from_environment())

    # Each stage's result is an object of its own, and prints.
    for stage in STAGES:
        printed = show(job, stage.name)
        print(f"---- {stage.name}: {type(job.done[stage.name]).__name__}, {len(printed):,} characters ----")
        print(*(line[:110] for line in printed.splitlines()[:12]), "...", sep="\n")

    # The checked spec: every name is resolved, every shape known.
    spec = job.done["check"]
    print("\nop takes:", ", ".join(f"{tensor.keyword}{list(tensor.shape)}" for tensor in spec.tensors))

    # The derived rule, as a paper's appendix would have it.
    print("\n" + explain(job.done["derive"], latex=True))

    # The programs: which form the recurrence takes, and what one chunk computes.
    lowered = job.done["lower"]
    print(f"\nrecurrence: {lowered.title}")
    print((lowered.chunk or lowered.token).forward)


if __name__ == "__main__":
    main()
