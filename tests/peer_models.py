"""torchvision's, timm's and transformers' models as subjects, where those packages are installed.

None of them fetches weights: they are random, and those of transformers are made small by their configuration.
"""

import contextlib
import functools
import importlib.util

import pytest
import torch

TORCHVISION = (
    "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "vgg11_bn", "mobilenet_v2", "mobilenet_v3_small",
    "mobilenet_v3_large", "efficientnet_b0", "efficientnet_v2_s", "densenet121", "googlenet", "inception_v3",
    "regnet_y_400mf", "regnet_x_400mf", "shufflenet_v2_x0_5", "mnasnet0_5",
)  # fmt: skip
SEGMENTATION = ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
VIDEO = ("r3d_18", "r2plus1d_18")
DETECTION = ("retinanet_resnet50_fpn",)  # of which the backbone with its pyramid is run
TIMM = (
    "resnet26d", "seresnet18", "mobilenetv3_small_050", "efficientnet_lite0", "mixnet_s", "repvgg_a0", "dla34",
    "hrnet_w18_small", "ghostnet_100", "regnetx_002", "densenet121", "tresnet_m", "cspresnet50", "levit_128s",
    "mobileone_s0", "ese_vovnet19b_dw", "res2net50_26w_4s", "selecsls42", "dpn68", "skresnet18", "resnest14d",
    "mobilenetv4_conv_small", "fastvit_t8", "rexnet_100", "hardcorenas_a", "convmixer_768_32",
)  # fmt: skip

# Of transformers: the class, the name of its configuration, what that is given, and the shape of the input.
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_IMAGE = (1, 3, 64, 64)
TRANSFORMERS = {
    "resnet": ("ResNetForImageClassification", "ResNetConfig", _RESNET, _IMAGE),
    "regnet": ("RegNetForImageClassification", "RegNetConfig", {**_RESNET, "groups_width": 8}, _IMAGE),
    "mobilenet_v1": (
        "MobileNetV1ForImageClassification", "MobileNetV1Config", {"depth_multiplier": 0.25}, (1, 3, 96, 96)
    ),
    "mobilenet_v2": (
        "MobileNetV2ForImageClassification", "MobileNetV2Config", {"depth_multiplier": 0.35}, (1, 3, 96, 96)
    ),
    "mobilenet_v2_segmentation": (
        "MobileNetV2ForSemanticSegmentation", "MobileNetV2Config", {"depth_multiplier": 0.35}, (1, 3, 96, 96)
    ),
    "levit": (
        "LevitForImageClassification", "LevitConfig", {"hidden_sizes": [64, 96, 128], "depths": [1, 1, 1]},
        (1, 3, 224, 224),
    ),
    "mobilevit": ("MobileViTForImageClassification", "MobileViTConfig", {}, _IMAGE),
    "mobilevit_v2": ("MobileViTV2ForImageClassification", "MobileViTV2Config", {"width_multiplier": 0.5}, _IMAGE),
    "efficientnet": (
        "EfficientNetForImageClassification", "EfficientNetConfig",
        {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640}, _IMAGE,
    ),
    "cvt": ("CvtForImageClassification", "CvtConfig", {}, _IMAGE),
    "swiftformer": (
        "SwiftFormerForImageClassification", "SwiftFormerConfig",
        {"depths": [1, 1, 2, 1], "embed_dims": [16, 32, 48, 64]}, _IMAGE,
    ),
    "hgnet_v2": ("HGNetV2ForImageClassification", "HGNetV2Config", {}, _IMAGE),
    "textnet": ("TextNetForImageClassification", "TextNetConfig", {}, _IMAGE),
    "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig", {}, _IMAGE),
    "upernet": (
        "UperNetForSemanticSegmentation", "UperNetConfig",
        {"hidden_size": 32, "auxiliary_channels": 16, "backbone_config": ("ResNetConfig", {"out_features": _STAGES})},
        _IMAGE,
    ),
    "dpt": (
        "DPTForDepthEstimation", "DPTConfig",
        {**_TINY, "num_hidden_layers": 4, "use_batch_norm_in_fusion_residual": True, "image_size": 64,
         "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16] * 4, "fusion_hidden_size": 16},
        _IMAGE,
    ),
    "wav2vec2_conformer": (
        "Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerConfig", {**_TINY, "vocab_size": 32, "conv_dim": [32] * 7},
        (1, 4000),
    ),
    "rt_detr": (
        "RTDetrForObjectDetection", "RTDetrConfig", {"encoder_layers": 1, "decoder_layers": 1, "num_queries": 20},
        _IMAGE,
    ),
    "d_fine": (
        "DFineForObjectDetection", "DFineConfig", {"encoder_layers": 1, "decoder_layers": 2, "num_queries": 20},
        _IMAGE,
    ),
    "detr": (
        "DetrForObjectDetection", "DetrConfig",
        {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "encoder_layers": 1,
         "decoder_layers": 1, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "backbone_config": ("ResNetConfig", {"out_features": ["stage4"]})},
        _IMAGE,
    ),
    "patchtst": ("PatchTSTForPrediction", "PatchTSTConfig", {}, (2, 32, 1)),
    "patchtsmixer": ("PatchTSMixerForPrediction", "PatchTSMixerConfig", {"norm_mlp": "BatchNorm"}, (2, 32, 1)),
}  # fmt: skip
# These have no BN layer.
TRANSFORMERS_WITHOUT = {
    "vit": ("ViTForImageClassification", "ViTConfig", {**_TINY, "image_size": 64}, _IMAGE),
    "convnext": (
        "ConvNextForImageClassification", "ConvNextConfig",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}, _IMAGE,
    ),
    "poolformer": (
        "PoolFormerForImageClassification", "PoolFormerConfig",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}, _IMAGE,
    ),
}  # fmt: skip


@functools.cache
def torchvision():
    """Import torchvision, whose compiled operators are missing where torch is a CPU build of its own."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    library = torch.library.Library("torchvision", "DEF")
    for schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                   "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):  # fmt: skip
        with contextlib.suppress(RuntimeError):  # they are there after all
            library.define(schema)
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision cannot be imported: {error}")
    torchvision._kept = library  # the operators live as long as their library
    return torchvision


def size_of(name):
    if name in VIDEO:
        return (1, 3, 8, 48, 48)
    return (1, 3, 224, 224) if name.startswith(("levit", "fastvit")) else (1, 3, 96, 96)


def of_transformers(name):
    """A model that only its configuration describes, and the shape of its input."""
    transformers = pytest.importorskip("transformers")
    kind, config, options, shape = {**TRANSFORMERS, **TRANSFORMERS_WITHOUT}[name]
    options = dict(options)
    if "backbone_config" in options:
        inner, its = options["backbone_config"]
        options["backbone_config"] = getattr(transformers, inner)(**_RESNET, **its)
    return getattr(transformers, kind)(getattr(transformers, config)(**options)), shape


def subject(family, name):
    """A model without weights from the network, in evaluation mode, and an example."""
    vision = torchvision()  # the others import it, too
    shape = size_of(name)
    if family == "timm":
        timm = pytest.importorskip("timm")
        model = timm.create_model(name, pretrained=False)
    elif family == "transformers":
        model, shape = of_transformers(name)
    else:
        home = {"vision": vision.models, "segmentation": vision.models.segmentation, "video": vision.models.video,
                "detection": vision.models.detection}[family]  # fmt: skip
        options = {"weights_backbone": None} if family in ("segmentation", "detection") else {}
        if name in ("googlenet", "inception_v3"):
            options = {"init_weights": False, "aux_logits": False}
        model = getattr(home, name)(weights=None, **options)
    return model.eval(), torch.randn(shape)


SUBJECTS = [
    (family, name)
    for family, names in (
        ("vision", TORCHVISION), ("segmentation", SEGMENTATION), ("video", VIDEO), ("detection", DETECTION),
        ("timm", TIMM), ("transformers", TRANSFORMERS),
    )
    for name in names
]  # fmt: skip
# Small enough for every run of the tests.
QUICK = [
    ("vision", "mobilenet_v3_small"), ("vision", "shufflenet_v2_x0_5"), ("vision", "mnasnet0_5"),
    ("timm", "mobilenetv3_small_050"),
    ("transformers", "resnet"), ("transformers", "mobilenet_v2"), ("transformers", "levit"), ("transformers", "detr"),
]  # fmt: skip
