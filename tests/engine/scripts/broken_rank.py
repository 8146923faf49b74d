"""A start at which one of two stages cannot be set up. Prints what the user is told.

Usage: broken_rank.py MODEL_FOLDER
"""

import sys

from nnsight_pp import VLLM, EngineError


def main():
    model = VLLM(
        sys.argv[1], pipeline_parallel_size=2, dtype="float32", enforce_eager=True, max_model_len=64
    )
    model._arguments["worker_cls"] = "broken_rank.BrokenRank"
    try:
        model.dispatch()
    except EngineError as error:
        print(error)


if __name__ == "__main__":
    main()
else:
    from nnsight_pp.engines.vllm.rank import RankWorker

    class BrokenRank(RankWorker):
        """Its last stage cannot run the model."""

        def _trial_forward(self, runner, place, points, names):
            if place.stage == 1:
                raise RuntimeError("no forward on this stage")
            return super()._trial_forward(runner, place, points, names)
