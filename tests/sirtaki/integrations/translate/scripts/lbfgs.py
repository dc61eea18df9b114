"""LBFGS with a closure over the whole data set: no loader at all."""

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim


class Curve(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.net(x)


if __name__ == "__main__":
    np.random.seed(0)
    torch.manual_seed(0)
    x = np.linspace(-2, 2, 128)[:, None]
    y = np.sin(3 * x) + 0.05 * np.random.randn(*x.shape)
    input = torch.from_numpy(x)
    target = torch.from_numpy(y)
    model = Curve().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=6)
    for i in range(4):
        print("STEP:", i)

        def closure():
            optimizer.zero_grad()
            out = model(input)
            loss = criterion(out, target)
            print("loss:", loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        pred = model(input)
        print("test loss:", criterion(pred, target).item())
