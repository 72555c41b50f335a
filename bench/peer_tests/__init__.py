"""DeepSpeed's own tests, run under DeepSpeed and under zeropp's stand-in, and compared.

    git clone https://github.com/deepspeedai/DeepSpeed SOURCE     # at the release's tag, or near it
    python -m bench.peer_tests --source SOURCE --peer PEER/bin/python --ours OURS/bin/python --save peer-tests

PEER is an environment with DeepSpeed. OURS is an environment with zeropp and without DeepSpeed. Both need the same
torch, transformers, mup, and a pytest below 8.4, because later versions reject the fixtures of these tests. The command
copies the checkout's ``tests`` folder and runs it file by file on the CPU. It copies only that folder, because Python
would import the ``deepspeed`` package beside it.

The command fails in three cases: less than 75 % of the tests that pass under DeepSpeed pass under the stand-in; such a
test does not pass and has no reason in ``reasons.json``; or a reason fits no such test, or a test that passes.
"""
