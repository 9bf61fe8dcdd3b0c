"""Stock architectures for the doctor: random weights, exact statistics of random data, a sound optimiser.

Whatever the doctor finds in them is either true or a false alarm; errors and warnings would say that the authors of
these networks are wrong.
"""

import warnings

import pytest
import torch

import batchnorm as bn
import peer_models
from batchnorm.doctor.findings import Findings

BATCHES, BATCH = 3, 8
TRANSFORMERS = ("resnet", "regnet", "mobilenet_v1", "mobilenet_v2", "efficientnet", "levit", "cvt", "segformer",
                "mobilevit", "patchtst", "wav2vec2_conformer", "rt_detr_resnet")  # fmt: skip
QUICK = [("vision", "resnet18"), ("vision", "mobilenet_v3_small"), ("vision", "shufflenet_v2_x0_5"),
         ("timm", "mobilenetv3_small_050"), ("transformers", "resnet"), ("transformers", "segformer")]  # fmt: skip
# Warnings that are true, and stay: what is found, and why it is right.
TRUE = {
    ("segmentation", "deeplabv3_mobilenet_v3_large"): {"BN112"},
    ("transformers", "mobilenet_v1"): {"BN104"},
    ("transformers", "mobilenet_v2"): {"BN104"},
    ("transformers", "efficientnet"): {"BN104"},
}
WHY = {
    "BN101": "The layer has a bias and goes to nothing but BN in training mode, which subtracts the mean: "
    "its gradient is zero but for rounding. Harmless; in some of these networks the bias is there because the weights "
    "were converted from a framework that had it.",
    "BN112": "DeepLabV3's head has a dropout of one half before the convolution that its last BN layer follows: the "
    "variance that the layer learns in training is not that of evaluation (Li et al. 2019). The factor is measured "
    "here, with random weights; trained ones may make it smaller.",
    "BN113": "With random weights some channels after a ReLU are zero for nearly all inputs, and an identity branch "
    "normalises them: true of these weights, and nothing that the architecture is to blame for.",
    "BN502": "Two kinds. Some layers cannot be folded: the network normalises before it convolves (pre-activation), or "
    "joins, sums or branches before it normalises, so that no linear layer beside them could take them in. Others "
    "have an activation inside (timm's BatchNormAct2d), which torch's own fuse functions lose, and `bn.fold` keeps. "
    "Properties of the architecture, and said so that nobody looks for a fold that cannot be, or trusts a wrong one.",
    "BN104": "The configuration has TensorFlow's momentum, the weight of the old value, as torch's, the weight of the "
    "new one: training would give running statistics of the last batch. Inference with the published weights is not "
    "affected (huggingface/transformers#19454).",
}
SUBJECTS = [*peer_models.SUBJECTS, *(("transformers", name) for name in TRANSFORMERS)]


def from_transformers(name):
    """A network of transformers in small, and the sizes of an input."""
    peer_models.torchvision()  # some of them import it
    transformers = pytest.importorskip("transformers")
    widths = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}
    image = (BATCH, 3, 64, 64)
    made = {
        "resnet": lambda: (transformers.ResNetModel(transformers.ResNetConfig(embedding_size=16, **widths)), image),
        "regnet": lambda: (
            transformers.RegNetModel(transformers.RegNetConfig(embedding_size=16, groups_width=8, **widths)), image
        ),
        "mobilenet_v1": lambda: (
            transformers.MobileNetV1Model(transformers.MobileNetV1Config(depth_multiplier=0.25)), image
        ),
        "mobilenet_v2": lambda: (
            transformers.MobileNetV2Model(transformers.MobileNetV2Config(depth_multiplier=0.35)), image
        ),
        "efficientnet": lambda: (
            transformers.EfficientNetModel(transformers.EfficientNetConfig(
                width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320)), image
        ),
        "levit": lambda: (transformers.LevitModel(transformers.LevitConfig(depths=[1, 1, 1])), (BATCH, 3, 224, 224)),
        "cvt": lambda: (transformers.CvtModel(transformers.CvtConfig(depth=[1, 2, 3])), image),
        "segformer": lambda: (
            transformers.SegformerForSemanticSegmentation(
                transformers.SegformerConfig(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
                                             decoder_hidden_size=32, num_labels=5)), image
        ),
        "mobilevit": lambda: (transformers.MobileViTModel(transformers.MobileViTConfig(
            hidden_sizes=[24, 32, 48], neck_hidden_sizes=[8, 8, 16, 24, 32, 48, 64], image_size=64)), image),
        "patchtst": lambda: (transformers.PatchTSTModel(transformers.PatchTSTConfig(
            context_length=64, patch_length=8, patch_stride=8, num_input_channels=3, d_model=32, ffn_dim=64,
            num_hidden_layers=2)), (BATCH, 64, 3)),
        "wav2vec2_conformer": lambda: (transformers.Wav2Vec2ConformerModel(transformers.Wav2Vec2ConformerConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4, mask_time_prob=0.0)), (BATCH, 2000)),
        "rt_detr_resnet": lambda: (transformers.RTDetrResNetBackbone(transformers.RTDetrResNetConfig(
            embedding_size=16, **widths)), image),
    }[name]  # fmt: skip
    return made()


def made(family, name):
    """A model in evaluation mode with the exact statistics of the batches, and these."""
    torch.manual_seed(0)
    if family == "transformers":
        model, size = from_transformers(name)
    else:
        model, example = peer_models.subject(family, name)
        batch, side = (4 if family in ("segmentation", "detection", "video") else BATCH), example.shape[-1]
        small = 64 if family != "video" and name != "inception_v3" and side == 96 else side
        size = (batch, *example.shape[1:-2], small, small)
        if family == "detection":  # of which the loss needs boxes; its backbone with the pyramid is a network by itself
            model = model.backbone
    batches = [torch.randn(size) for _ in range(BATCHES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the models' own libraries
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
