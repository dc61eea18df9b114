"""nn.DataParallel, options in a dict, running loss printed every few batches, checkpoints of model.module."""

import json

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

cfg = dict(lr=0.05, epochs=2, batch_size=48, hidden=40, seed=42)


def set_seed(seed):
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def get_loaders(cfg):
    bunch = load_digits()
    images = torch.from_numpy(bunch.data.astype(np.float32) / 16.0)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    train = TensorDataset(images[:1200], labels[:1200])
    test = TensorDataset(images[1200:], labels[1200:])
    return (
        DataLoader(train, batch_size=cfg["batch_size"], shuffle=True),
        DataLoader(test, batch_size=256, shuffle=False),
    )


def build_model(cfg):
    model = nn.Sequential(nn.Linear(64, cfg["hidden"]), nn.GELU(), nn.Linear(cfg["hidden"], 10))
    return model


set_seed(cfg["seed"])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
trainloader, testloader = get_loaders(cfg)
net = build_model(cfg)
net = nn.DataParallel(net)
net.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=cfg["lr"], momentum=0.9, weight_decay=5e-4)

history = {"loss": [], "acc": []}
for epoch in range(cfg["epochs"]):  # loop over the dataset multiple times
    net.train()
    running_loss = 0.0
    epoch_correct, epoch_total = 0, 0
    for i, data in enumerate(trainloader, 0):
        inputs, labels = data[0].to(device), data[1].to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        _, predicted = torch.max(outputs.data, 1)
        epoch_total += labels.size(0)
        epoch_correct += (predicted == labels).sum().item()
        running_loss += loss.item()
        if i % 10 == 9:  # print every 10 mini-batches
            print("[%d, %5d] loss: %.6f" % (epoch + 1, i + 1, running_loss / 10))
            history["loss"].append(running_loss / 10)
            running_loss = 0.0
    history["acc"].append(epoch_correct / epoch_total)
    print("train accuracy: %.3f %%" % (100.0 * epoch_correct / epoch_total))

all_preds, all_labels = [], []
net.eval()
with torch.no_grad():
    for images, labels in testloader:
        all_preds.append(net(images.to(device)).argmax(1).cpu().numpy())
        all_labels.append(labels.numpy())
test_acc = float(np.mean(np.concatenate(all_preds) == np.concatenate(all_labels)))
print("Accuracy on the test images: %.4f" % test_acc)
torch.save({"state_dict": net.module.state_dict(), "cfg": cfg}, "model_final.pth")
with open("history.json", "w") as f:
    json.dump(history, f)
