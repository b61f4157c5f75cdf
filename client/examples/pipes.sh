#!/bin/sh
# Requests, one line of JSON each. Each gets one line with its answer, also when it crashes or hangs. cppool is in PATH.
printf '%s\n' \
  '{"op": "hello", "id": 1}' \
  '{"op": "run", "id": 2, "params": {"cp_comm_type": "a2a", "max_seqlen_q": 128}}' \
  '{"op": "run", "id": 3, "params": {"cp_comm_type": "a2b"}}' |
  cppool pipe --world-size 2
