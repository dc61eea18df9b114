"""Batch norm and dropout, meters, ReduceLROnPlateau, early stopping, the best weights saved and loaded again."""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class AverageMeter(object):
    """Computes and stores the average and current value"""

    def __init__(self):
        self.reset()

    def reset(self):
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Digits(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(64, 48), nn.BatchNorm1d(48)
        self.drop = nn.Dropout(p)
        self.out = nn.Linear(48, 10)

    def forward(self, x):
        return self.out(self.drop(F.relu(self.bn1(self.fc1(x)))))


def accuracy(output, target):
    with torch.no_grad():
        pred = output.argmax(dim=1)
        return (pred == target).float().mean() * 100.0


def train_one_epoch(loader, model, criterion, optimizer, epoch, device):
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    for images, target in loader:
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1 = accuracy(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(acc1.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"Epoch [{epoch}] loss {losses.avg:.6f} acc {top1.avg:.3f}")
    return losses.avg


def evaluate(loader, model, criterion, device):
    model.eval()
    running, correct, total = 0.0, 0, 0
    with torch.inference_mode():
        for images, target in loader:
            images, target = images.to(device), target.to(device)
            output = model(images)
            running += criterion(output, target).item() * target.shape[0]
            correct += (output.argmax(1) == target).sum().item()
            total += len(target)
    return running / total, correct / total


def main(patience=2, max_epochs=6):
    torch.manual_seed(3)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    order = torch.randperm(len(data)).tolist()
    train_loader = DataLoader(Subset(data, order[:960]), batch_size=64, shuffle=True)
    val_loader = DataLoader(Subset(data, order[960:1300]), batch_size=64, shuffle=False)
    model = Digits().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", patience=0, factor=0.3)
    best_loss, best_model, bad_epochs = float("inf"), None, 0
    path = Path("best.pt")
    for epoch in range(max_epochs):
        train_loss = train_one_epoch(train_loader, model, criterion, optimizer, epoch, device)
        val_loss, val_acc = evaluate(val_loader, model, criterion, device)
        scheduler.step(val_loss)
        print(f"val loss {val_loss:.6f} acc {val_acc:.4f} lr {optimizer.param_groups[0]['lr']:.4f}")
        if val_loss < best_loss:
            best_loss = val_loss
            best_model = copy.deepcopy(model.state_dict())
            bad_epochs = 0
            torch.save(best_model, path)
        else:
            bad_epochs += 1
            if bad_epochs >= patience:
                print(f"stopping early at epoch {epoch}, train loss {train_loss:.4f}")
                break
    model.load_state_dict(torch.load(path))
    loss, acc = evaluate(train_loader, model, criterion, device)
    print(f"best model on its training data: loss {loss:.6f} acc {acc:.4f}")


if __name__ == "__main__":
    main()
