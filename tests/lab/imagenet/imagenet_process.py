"""Train in a process of its own, or in several under torchrun: options and the recorder's arguments as JSON."""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from imagenet_recorder import Follower, Recorder

from batchnorm.lab.imagenet.train import run


def main():
    folder, options, arguments = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    first = not several or dist.get_rank() == 0
    recorder = Recorder(folder, **arguments) if first else None
    if several:
        sent = [recorder.restored() if recorder else None]
        dist.broadcast_object_list(sent)
        recorder = recorder or Follower(sent[0])
    result = run(options, recorder)
    if first:
        (pathlib.Path(folder) / "result.json").write_text(json.dumps(result))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
