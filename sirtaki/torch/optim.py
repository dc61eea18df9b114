"""An optimizer that PyTorch does not have: `AdamSGD`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_STATES = ("momentum", "mean", "square")


class AdamSGD(torch.optim.Optimizer):
    """Optimizer that begins as Adam and ends as SGD with momentum.

    An update is `λ · (update of Adam) + (1 − λ) · (update of SGD)`. λ falls linearly from 1 to 0 over `decay_steps`.

    AIACC (section IV) describes an optimizer that combines Adam and SGD with linear decay, without equations. This
    class is our interpretation. AIACC's learning rate decays linearly as well: use
    `torch.optim.lr_scheduler.LinearLR`, which scales both learning rates.
    """

    def __init__(
        self,
        params: Any,  # Parameters or parameter groups, as for PyTorch's optimizers.
        lr: float = 1e-3,
        *,
        decay_steps: int = 10_000,
        sgd_scale: float = 10.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        foreach: bool = True,
    ) -> None:
        """Create the optimizer.

        Args:
            params: parameters or parameter groups, as for PyTorch's optimizers.
            lr: learning rate of Adam.
            decay_steps: number of steps until updates are those of SGD only.
            sgd_scale: learning rate of SGD as a multiple of `lr`.
            betas: betas of Adam.
            eps: epsilon of Adam.
            momentum: momentum of SGD.
            weight_decay: decoupled weight decay, as in AdamW: each step multiplies the parameters by
                `1 - lr · weight_decay`.
            foreach: update all parameters with the same device and dtype at once. False takes less memory.

        Raises:
            ValueError: a value is out of range.
        """
        for name, value, valid in (
            ("lr", lr, lr >= 0),
            ("decay_steps", decay_steps, decay_steps > 0),
            ("sgd_scale", sgd_scale, sgd_scale >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("momentum", momentum, 0 <= momentum < 1),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not valid:
                raise ValueError(f"AdamSGD: invalid {name}={value}")
        super().__init__(
            params,
            {
                "lr": lr,
                "decay_steps": decay_steps,
                "sgd_scale": sgd_scale,
                "betas": betas,
                "eps": eps,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "foreach": foreach,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Return the result of the closure. Without a closure, return None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[object, list[torch.Tensor]] = {}
            for number, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise RuntimeError(
                        "AdamSGD does not support sparse gradients; use another optimizer, or layers with sparse=False"
                    )
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state |= {name: torch.zeros_like(param) for name in _STATES}
                state["step"] += 1
                kind = (param.device, param.dtype, state["step"]) if group["foreach"] else number
                alike.setdefault(kind, []).append(param)
            for params in alike.values():
                self._update(params, group)
        return loss

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update parameters that have the same device, dtype and number of steps so far.

        Args:
            params: parameters with a gradient.
            group: parameter group of the optimizer, which contains the options such as `lr`.
        """
        step, lr = self.state[params[0]]["step"], group["lr"]
        adams = max(0.0, 1.0 - (step - 1) / group["decay_steps"])  # λ, the weight of Adam's update.
        values, gradients = _real(params), _real([param.grad for param in params if param.grad is not None])
        momenta, means, squares = (_real([self.state[param][name] for param in params]) for name in _STATES)
        if group["weight_decay"]:
            torch._foreach_mul_(values, 1.0 - lr * group["weight_decay"])
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients)
        if adams < 1.0:
            torch._foreach_add_(values, momenta, alpha=-(1.0 - adams) * lr * group["sgd_scale"])
        if adams > 0.0:
            first, second = group["betas"]
            torch._foreach_lerp_(means, gradients, 1.0 - first)
            torch._foreach_mul_(squares, second)
            torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - second)
            roots = torch._foreach_sqrt(squares)
            torch._foreach_div_(roots, (1.0 - second**step) ** 0.5)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_addcdiv_(values, means, roots, -adams * lr / (1.0 - first**step))


def _real(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of complex tensors as real tensors.

    PyTorch's Adam also updates the real and the imaginary part separately.
    """
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
