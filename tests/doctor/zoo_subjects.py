"""Stock architectures for the doctor: random weights, exact statistics of random data, a sound optimiser.

Whatever the doctor finds in them is either true or a false alarm; errors and warnings would say that the authors of
these networks are wrong.
"""

import contextlib
import warnings

import torch

import batchnorm as bn
import peer_models
from batchnorm.doctor.findings import Findings

BATCHES, BATCH = 3, 8
QUICK = [("vision", "resnet18"), ("vision", "mobilenet_v3_small"), ("vision", "shufflenet_v2_x0_5"),
         ("timm", "mobilenetv3_small_050"), ("transformers", "resnet"), ("transformers", "segformer")]  # fmt: skip
# Warnings that are true, and stay: what is found, and why it is right.
TRUE = {
    ("segmentation", "deeplabv3_mobilenet_v3_large"): {"BN112"},
    ("transformers", "mobilenet_v1"): {"BN104"},
    ("transformers", "mobilenet_v2"): {"BN104"},
    ("transformers", "mobilenet_v2_segmentation"): {"BN104"},
    ("transformers", "efficientnet"): {"BN104", "BN115"},
    ("transformers", "mobilevit"): {"BN115"},
    ("transformers", "mobilevit_v2"): {"BN115"},
    ("transformers", "rt_detr"): {"BN115"},
}
WHY = {
    "BN101": "The layer has a bias and goes to nothing but BN in training mode, which subtracts the mean: "
    "its gradient is zero but for rounding. Harmless; in some of these networks the bias is there because the weights "
    "were converted from a framework that had it.",
    "BN112": "DeepLabV3's head has a dropout of one half before the convolution that its last BN layer follows: the "
    "variance that the layer learns in training is not that of evaluation (Li et al. 2019). The factor is measured "
    "here, with random weights; trained ones may make it smaller.",
    "BN113": "With random weights some channels are nearly constant for these inputs (behind a ReLU that is off, or a "
    "depthwise filter of small weights): true of these weights, and nothing that the architecture is to blame for.",
    "BN115": "Its `_init_weights` draws gamma from N(0, 0.02), as the weights of convolutions: a model that is trained "
    "from scratch begins with layers that scale their channels to a fiftieth. Published weights are not affected.",
    "BN502": "The network normalises before it convolves (pre-activation), or joins, sums or branches before it "
    "normalises, or pads what BN made: no linear layer beside could take these layers in. A property of the "
    "architecture, reported so that the missing fold is no surprise.",
    "BN104": "The configuration has TensorFlow's momentum, the weight of the old value, as torch's, the weight of the "
    "new one: training would give running statistics of the last batch. Inference with the published weights is not "
    "affected (huggingface/transformers#19454).",
}
SUBJECTS = peer_models.SUBJECTS


def made(family, name):
    """A model in evaluation mode with the exact statistics of the batches, and these."""
    torch.manual_seed(0)
    model, example = peer_models.subject(family, name)
    batch, sides = (4 if family in ("segmentation", "detection", "video") else BATCH), example.shape[1:]
    if sides == (3, 96, 96) and family != "video" and name != "inception_v3":
        sides = (3, 64, 64)
    if family == "detection":  # of which the loss needs boxes; its backbone with the pyramid is a network by itself
        model = model.backbone
    batches = [torch.randn(batch, *sides) for _ in range(BATCHES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the models' own libraries
        with contextlib.suppress(bn.BatchNormError):  # all of its BN layers are frozen, as DETR's
            model, _ = bn.calibrate(model.eval(), batches, progress=False)
    return model, batches


def examined(family, name):
    """What the doctor finds in a stock model, both as it is deployed and as it is trained."""
    model, batches = made(family, name)
    optimizer = torch.optim.SGD(bn.param_groups(model, 1e-4), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deployed = bn.check(model, data=batches)
        trained = bn.check(model.train(), batches[0], optimizer=optimizer)
    found = {(f.code, f.path): f for f in (*deployed, *trained)}
    skipped = {code: why for code, why in trained.skipped.items() if code in deployed.skipped}
    return Findings(found.values(), skipped, {**deployed.failed, **trained.failed}, deployed.subject)
