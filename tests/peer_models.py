"""torchvision's and timm's models as subjects, where those packages are installed."""

import contextlib
import functools

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
    "mobilenetv4_conv_small", "fastvit_t8", "rexnet_100", "hardcorenas_a",
)  # fmt: skip


@functools.cache
def torchvision():
    """Import torchvision, whose compiled operators are missing where torch is a CPU build of its own."""
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


def subject(family, name):
    """A model without weights from the network, in evaluation mode, and an example."""
    vision = torchvision()  # timm imports it, too
    if family == "timm":
        timm = pytest.importorskip("timm")
        model = timm.create_model(name, pretrained=False)
    else:
        home = {"vision": vision.models, "segmentation": vision.models.segmentation, "video": vision.models.video,
                "detection": vision.models.detection}[family]  # fmt: skip
        options = {"weights_backbone": None} if family in ("segmentation", "detection") else {}
        if name in ("googlenet", "inception_v3"):
            options = {"init_weights": False, "aux_logits": False}
        model = getattr(home, name)(weights=None, **options)
    return model.eval(), torch.randn(size_of(name))


SUBJECTS = [
    (family, name)
    for family, names in (
        ("vision", TORCHVISION), ("segmentation", SEGMENTATION), ("video", VIDEO), ("detection", DETECTION),
        ("timm", TIMM),
    )
    for name in names
]  # fmt: skip
