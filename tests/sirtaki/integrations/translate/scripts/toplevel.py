"""Code at the top level, as in a notebook; the last batch's loss is printed."""

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
digits = load_digits()
X = torch.tensor(digits.data[:640], dtype=torch.float32) / 16
y = torch.tensor(digits.target[:640])
train_loader = DataLoader(TensorDataset(X, y), batch_size=32, shuffle=True)

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    for inputs, targets in train_loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())

with torch.no_grad():
    accuracy = (model(X.to(device)).argmax(1).cpu() == y).float().mean()
print(f"accuracy {accuracy:.4f}")
