"""A recommender with two towers: users' and items' embeddings have sparse gradients. Only accessed rows are sent.

    sirtakirun -np 2 python examples/two_tower.py

Clicks are synthetic: users and items have hidden tastes, and few items get most clicks (Zipf's law). All items of a
batch that a user has not clicked on are negatives. At the end, each rank tests a part of the users: is the held-out
click among the ten items with the best score, and is it among the ten most popular items?
"""

import argparse
import time

import torch
from torch import nn

import sirtaki.torch as hvd

TASTES, PER_USER, LOOKED_AT = 8, 10, 200


def clicks(n_users: int, n_items: int) -> torch.Tensor:
    """Return the distinct items that each user has clicked on, `(n_users, PER_USER)`. The last of each is held out."""
    generator = torch.Generator().manual_seed(1)
    users, items = (torch.randn(n, TASTES, generator=generator) for n in (n_users, n_items))
    popularity = (1 / torch.arange(1, n_items + 1))[torch.randperm(n_items, generator=generator)]
    # Users look at popular items, and click on those that they like best.
    looked_at = popularity.multinomial(n_users * LOOKED_AT, replacement=True, generator=generator)
    looked_at = looked_at.view(n_users, LOOKED_AT).sort(dim=1).values
    liking = torch.einsum("ut,ukt->uk", users, items[looked_at]) + torch.randn(looked_at.shape, generator=generator)
    liking[:, 1:][looked_at[:, 1:] == looked_at[:, :-1]] = -torch.inf  # duplicate item
    clicked = looked_at.gather(1, liking.topk(PER_USER).indices)
    return clicked.gather(1, torch.rand(clicked.shape, generator=generator).argsort(dim=1))


class Tower(nn.Module):
    """An embedding, followed by a small net shared by all rows."""

    def __init__(self, n_rows: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(n_rows, width, sparse=True)
        nn.init.normal_(self.rows.weight, std=0.1)
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        rows = self.rows(numbers)
        return rows + self.net(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=16000)
    parser.add_argument("--items", type=int, default=8000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=512, help="clicks per rank")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise PyTorch warns about Adagrad
    clicked = clicks(args.users, args.items)
    known, kept_back = clicked[:, :-1], clicked[:, -1:]
    popularity = torch.bincount(known.flatten(), minlength=args.items)
    users = torch.arange(args.users)[:, None].expand_as(known)
    dataset = torch.utils.data.TensorDataset(users.flatten(), known.flatten())
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    # An item that is often in a batch is often a negative, too. Subtracting its log frequency corrects for this.
    often = (popularity + 1).log()

    model = nn.ModuleDict({"user": Tower(args.users, args.width), "item": Tower(args.items, args.width)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)  # updates the accessed rows, and dense layers
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    begin = time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total_loss = torch.zeros(())
        for users, items in loader:
            optimizer.zero_grad()
            scores = model["user"](users) @ model["item"](items).T - often[items]
            scores[(items == items[:, None]).fill_diagonal_(False)] = -torch.inf  # another clicked item
            loss = nn.functional.cross_entropy(scores, torch.arange(len(users)))
            loss.backward()
            optimizer.step()
            total_loss += loss.detach()
        mean_loss = hvd.allreduce(total_loss / len(loader), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean_loss:.3f}, {time.perf_counter() - begin:.1f} s", flush=True)

    found = torch.zeros(2)  # held-out clicks among the ten best by the model, and by popularity
    with torch.no_grad():
        items = model["item"](torch.arange(args.items))
        for users in torch.arange(hvd.rank(), args.users, hvd.size()).split(1000):
            for number, scores in enumerate((model["user"](users) @ items.T, popularity.float().repeat(len(users), 1))):
                best = scores.scatter(1, known[users], -torch.inf).topk(10).indices
                found[number] += (best == kept_back[users]).sum()
    recall, popular = (100 * hvd.allreduce(found, op=hvd.Sum, name="recall") / args.users).tolist()
    if hvd.rank() == 0:
        print(f"recall@10 of clicks kept back: {recall:.1f} %, by popularity {popular:.1f} %", flush=True)
        for summary in hvd.sparse_gradients():
            print(summary.describe(), flush=True)


if __name__ == "__main__":
    main()
