"""DeepSpeed's own tests, under DeepSpeed and under the stand-in: which of those that pass there pass here.

    git clone https://github.com/deepspeedai/DeepSpeed SOURCE     # at the tag of the release, or near it
    python -m bench.peer_tests --source SOURCE --peer PEER/bin/python --ours OURS/bin/python --save peer-tests

PEER is an environment with DeepSpeed, OURS one with zeropp and no DeepSpeed; both have the same torch, pytest below 8.4
(fixtures of those tests are of a kind that later ones do not know), transformers and mup. What is run is a copy of the
checkout's ``tests`` alone, file by file on CPU: the ``deepspeed`` beside them would be imported in place of either.

The command fails if less than 75 % pass here of what passes there, if one that does not has no reason in
``reasons.json``, or if a reason is given for one that passes.
"""
