"""Everything of a model that looking at it must not change, in a form that can be compared (as NaN cannot)."""

import torch


def snapshot(model):
    if not isinstance(model, torch.nn.Module):
        return {key: (id(value), str(value.tolist())) for key, value in model.items()}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "tensors": [(name, id(t), t.requires_grad, t._version, str(t.tolist())) for name, t in tensors],
        "modules": [
            (path, id(m), type(m), m.training, sorted(vars(m)), [len(getattr(m, h)) for h in vars(m) if "hooks" in h])
            for path, m in model.named_modules()
        ],
        "random": torch.get_rng_state().tolist(),
    }
