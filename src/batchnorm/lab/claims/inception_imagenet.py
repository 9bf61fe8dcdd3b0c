"""The paper's Figures 3 and 4 at full scale: listed with its command, not run with the other claims."""

from __future__ import annotations

from batchnorm.lab.judge.claim import Source, listed

CLAIM = listed(
    name="inception-imagenet",
    question="works",
    title="Inception reaches its accuracy on ImageNet in 14 times fewer steps",
    statement="With Batch Normalization and 5 times the learning rate, Inception reaches 72.2% on ImageNet in at least "
    "10 times fewer steps than without; and an ensemble of six has a top-5 error below 5%.",
    source=Source(
        "Ioffe & Szegedy 2015, Figures 3 and 4",
        "arXiv:1502.03167",
        "31.0 million steps without BN, 2.1 million with BN x5; top-5 error 4.9% with six networks",
    ),
    rule="Confirmed if BN x5 takes at most a tenth of the steps to 72.2%, and the ensemble "
    "misses at most 5% of the validation images in its first five guesses; "
    "batchnorm lab compare and batchnorm lab evaluate show both.",
    command="batchnorm lab run inception-imagenet --set variant=inception,bn-baseline,bn-x5,bn-x30,bn-x5-sigmoid "
    "--data imagenet/",
    method="The network of the paper's appendix in its five variants, batches of 32, single crop, 144 crops, and an "
    "ensemble of six.",
    retelling="The 14 is of the rate raised 5 times, not 30, and of six other changes at once: no dropout, less L2 "
    "penalty, a faster decay of the rate, no local response normalization, better shuffling, weaker distortions.",
    limits="It was not run here. It takes ImageNet (1.28 million images) and, by the estimate in docs/imagenet.md, "
    "1,000 core days for the network without BN to 72.2%, 70 for BN x5, 200 for each network of the ensemble; or GPUs.",
)
