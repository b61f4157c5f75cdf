#!/bin/sh
# Requests to a daemon, one line of JSON each; it writes one line for each answer to stdout and ends with its input. cppoold is in PATH.
# --sentinel '': without the mark that otherwise begins each answer.
printf '%s\n' \
  '{"op": "hello", "id": 1}' \
  '{"op": "run", "id": 2, "params": {"cp_comm_type": "a2a", "max_seqlen_q": 128}}' \
  '{"op": "run", "id": 3, "params": {"cp_comm_type": "a2b"}}' |
  cppoold --world-size 2 --sentinel ''
