"""Matrix factorisation with sparse embeddings (SparseAdam) beside a dense part, fit(), predict(), a CSV of its history."""

import csv
import os
import random

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, random_split

SEED = 17


class Ratings(Dataset):
    def __init__(self, n_users=30, n_items=40, n=900):
        rng = np.random.default_rng(SEED)
        self.users = torch.from_numpy(rng.integers(0, n_users, n))
        self.items = torch.from_numpy(rng.integers(0, n_items, n))
        u, v = rng.normal(size=(n_users, 3)), rng.normal(size=(n_items, 3))
        self.ratings = torch.from_numpy((u[self.users] * v[self.items]).sum(1).astype("float32"))
        self.n_users, self.n_items = n_users, n_items

    def __len__(self):
        return len(self.ratings)

    def __getitem__(self, index):
        return self.users[index], self.items[index], self.ratings[index]


class MF(nn.Module):
    def __init__(self, n_users, n_items, dim=6):
        super().__init__()
        self.user_factors = nn.Embedding(n_users, dim, sparse=True)
        self.item_factors = nn.Embedding(n_items, dim, sparse=True)
        self.scale = nn.Linear(dim, 1)

    def forward(self, user, item):
        return self.scale(self.user_factors(user) * self.item_factors(item)).squeeze(1)


class Recommender:
    def __init__(self, dataset, batch_size=30, epochs=3, lr=0.02):
        torch.manual_seed(SEED)
        random.seed(SEED)
        n_valid = 150
        self.train_set, self.valid_set = random_split(dataset, [len(dataset) - n_valid, n_valid])
        self.train_dl = DataLoader(self.train_set, batch_size, True)
        self.valid_dl = DataLoader(self.valid_set, batch_size * 2)
        self.net = MF(dataset.n_users, dataset.n_items)
        sparse = list(self.net.user_factors.parameters()) + list(self.net.item_factors.parameters())
        self.optimizers = [
            torch.optim.SparseAdam(sparse, lr=lr),
            torch.optim.Adam(self.net.scale.parameters(), lr=lr),
        ]
        self.loss_func = nn.MSELoss()
        self.epochs = epochs

    def loss_batch(self, user, item, rating, train=False):
        loss = self.loss_func(self.net(user, item), rating)
        if train:
            for opt in self.optimizers:
                opt.zero_grad()
            loss.backward()
            for opt in self.optimizers:
                opt.step()
        return loss.item(), len(rating)

    def fit(self):
        rows = []
        for epoch in range(self.epochs):
            self.net.train()
            losses, nums = zip(*[self.loss_batch(*batch, train=True) for batch in self.train_dl])
            train_loss = np.sum(np.multiply(losses, nums)) / np.sum(nums)
            self.net.eval()
            with torch.no_grad():
                losses, nums = zip(*[self.loss_batch(*batch) for batch in self.valid_dl])
            val_loss = np.sum(np.multiply(losses, nums)) / np.sum(nums)
            print(epoch, train_loss, val_loss)
            rows.append([epoch, train_loss, val_loss])
        return rows


if __name__ == "__main__":
    os.environ["PYTHONHASHSEED"] = str(SEED)
    recommender = Recommender(Ratings())
    rows = recommender.fit()
    with open("history.csv", "w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["epoch", "train", "valid"])
        writer.writerows(rows)
    torch.save(recommender.net, os.path.join(".", "recommender.pkl"))
