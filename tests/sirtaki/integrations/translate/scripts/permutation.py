"""Minibatches cut from a permutation by hand, several losses, plain functions and dictionaries of tensors."""

import torch
import torch.nn as nn


def make_data(n, d=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=g)
    w = torch.linspace(-1, 1, d)
    y = (X @ w + 0.3 * X[:, 0] ** 2).unsqueeze(1)
    c = (y > 0).float()
    return X, y, c


def train(net, X, y, c, n_epochs=5, batch_size=32, lr=1e-2):
    optimizer = torch.optim.RMSprop(net.parameters(), lr=lr)
    mse, bce = nn.MSELoss(), nn.BCEWithLogitsLoss()
    n = X.shape[0]
    history = []
    for epoch in range(n_epochs):
        permutation = torch.randperm(n)
        epoch_loss, batches = 0.0, 0
        for i in range(0, n, batch_size):
            indices = permutation[i : i + batch_size]
            batch_x, batch_y, batch_c = X[indices], y[indices], c[indices]
            optimizer.zero_grad()
            value, logit = net(batch_x).chunk(2, dim=1)
            loss1 = mse(value, batch_y)
            loss2 = bce(logit, batch_c)
            loss = loss1 + 0.5 * loss2
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
            batches += 1
        history.append(epoch_loss / batches)
        print("Epoch %d: %.7f" % (epoch, history[-1]))
    return history


torch.manual_seed(4)
X, y, c = make_data(256)
net = nn.Sequential(nn.Linear(6, 20), nn.SiLU(), nn.Linear(20, 2))
history = train(net, X, y, c)
assert history[-1] < history[0], "it does not learn"
with torch.no_grad():
    print("fit", nn.functional.mse_loss(net(X)[:, :1], y).item())
