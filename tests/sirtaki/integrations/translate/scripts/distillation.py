"""A frozen teacher, two optimizers for two parts of the student, zipped loaders, k folds."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Subset, TensorDataset


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 24), nn.ReLU())
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


def make_teacher():
    teacher = nn.Linear(64, 10)
    with torch.no_grad():
        nn.init.orthogonal_(teacher.weight)
    for p in teacher.parameters():
        p.requires_grad_(False)
    return teacher.eval()


def distill_loss(student_logits, teacher_logits, labels, T=2.0, alpha=0.3):
    soft = F.kl_div(
        F.log_softmax(student_logits / T, dim=1), F.softmax(teacher_logits / T, dim=1), reduction="batchmean"
    ) * (T * T)
    hard = F.cross_entropy(student_logits, labels)
    return alpha * soft + (1 - alpha) * hard


def run_fold(fold, labelled, unlabelled, valid, teacher, epochs=2):
    student = Student()
    opt_backbone = torch.optim.SGD(student.backbone.parameters(), lr=0.05, momentum=0.9)
    opt_head = torch.optim.Adam(student.head.parameters(), lr=0.005)
    for epoch in range(epochs):
        student.train()
        running = []
        for (x, y), (u, _) in zip(labelled, unlabelled):
            with torch.no_grad():
                t, tu = teacher(x), teacher(u)
            loss = distill_loss(student(x), t, y)
            loss = loss + 0.1 * F.mse_loss(student(u), tu)
            opt_backbone.zero_grad()
            opt_head.zero_grad()
            loss.backward()
            opt_backbone.step()
            opt_head.step()
            running.append(loss.item())
        print(f"fold {fold} epoch {epoch} loss {np.mean(running):.7f}")
    student.eval()
    hits = 0
    with torch.no_grad():
        for x, y in valid:
            hits += (student(x).argmax(1) == y).sum().item()
    return hits / len(valid.dataset)


def main():
    torch.manual_seed(0)
    np.random.seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data[:720], dtype=torch.float32) / 16, torch.tensor(digits.target[:720]))
    teacher = make_teacher()
    scores = []
    for fold, (train_ids, test_ids) in enumerate(KFold(n_splits=2, shuffle=True).split(np.arange(len(dataset)))):
        labelled = DataLoader(Subset(dataset, train_ids[:180]), batch_size=20, shuffle=True)
        unlabelled = DataLoader(Subset(dataset, train_ids[180:]), batch_size=20, shuffle=True)
        valid = DataLoader(Subset(dataset, test_ids), batch_size=60)
        scores.append(run_fold(fold, labelled, unlabelled, valid, teacher))
        print(f"fold {fold}: {scores[-1]:.4f}")
    print(f"mean {np.mean(scores):.4f} +- {np.std(scores):.4f}")


if __name__ == "__main__":
    main()
