"""One loop for both phases, loaders and sizes in dictionaries, the best weights copied."""

import copy
import time

import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
image_datasets = {"train": TensorDataset(x[:1200], y[:1200]), "val": TensorDataset(x[1200:1600], y[1200:1600])}
dataloaders = {p: DataLoader(image_datasets[p], batch_size=40, shuffle=True, num_workers=0) for p in ["train", "val"]}
dataset_sizes = {p: len(image_datasets[p]) for p in ["train", "val"]}
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def train_model(model, criterion, optimizer, scheduler, num_epochs=25):
    since = time.time()
    best_model_wts = copy.deepcopy(model.state_dict())
    best_acc = 0.0
    for epoch in range(num_epochs):
        print("Epoch {}/{}".format(epoch, num_epochs - 1))
        print("-" * 10)
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            running_loss = 0.0
            running_corrects = 0
            for inputs, labels in dataloaders[phase]:
                inputs = inputs.to(device)
                labels = labels.to(device)
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    _, preds = torch.max(outputs, 1)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                running_corrects += torch.sum(preds == labels.data)
            if phase == "train":
                scheduler.step()
            epoch_loss = running_loss / dataset_sizes[phase]
            epoch_acc = running_corrects.double() / dataset_sizes[phase]
            print("{} Loss: {:.6f} Acc: {:.4f}".format(phase, epoch_loss, epoch_acc))
            if phase == "val" and epoch_acc > best_acc:
                best_acc = epoch_acc
                best_model_wts = copy.deepcopy(model.state_dict())
    print("Best val Acc: {:4f}".format(best_acc))
    if time.time() - since > 600:
        print("slow")
    model.load_state_dict(best_model_wts)
    return model


net = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)).to(device)
for param in net[0].parameters():
    param.requires_grad = True
sgd = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
step_lr = lr_scheduler.StepLR(sgd, step_size=2, gamma=0.1)
net = train_model(net, nn.CrossEntropyLoss(), sgd, step_lr, num_epochs=3)
