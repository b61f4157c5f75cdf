"""A script as torchrun starts it: it makes a group, uses it and destroys it."""
import argparse
import os
import sys

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--code", type=int, default=0)
options = parser.parse_args()
dist.init_process_group(backend="gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item())
dist.destroy_process_group()
sys.exit(options.code)
