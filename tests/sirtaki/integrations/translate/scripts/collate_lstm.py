"""Sequences of different length, padded by a collate function, drawn by a WeightedRandomSampler, into an LSTM."""

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Parity(Dataset):
    def __init__(self, size, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(size):
            length = int(torch.randint(3, 9, (1,), generator=g))
            bits = torch.randint(0, 2, (length,), generator=g)
            self.items.append((bits, int(bits.sum() > length / 2)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, idx):
        return self.items[idx]


def collate_fn(batch):
    sequences, labels = zip(*batch)
    lengths = torch.tensor([len(s) for s in sequences])
    return pad_sequence(sequences, batch_first=True, padding_value=2), lengths, torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self, embedding_dim=8, hidden_dim=16):
        super().__init__()
        self.embedding = nn.Embedding(3, embedding_dim, padding_idx=2)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim, batch_first=True)
        self.fc = nn.Linear(hidden_dim, 2)

    def forward(self, text, lengths):
        packed = pack_padded_sequence(self.embedding(text), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.fc(hidden[-1])


def binary_accuracy(preds, y):
    correct = (preds.argmax(dim=1) == y).float()
    acc = correct.sum() / len(correct)
    return acc


def train(model, iterator, optimizer, criterion):
    epoch_loss = 0
    epoch_acc = 0
    model.train()
    for batch in iterator:
        text, lengths, label = batch
        optimizer.zero_grad()
        predictions = model(text, lengths)
        loss = criterion(predictions, label)
        acc = binary_accuracy(predictions, label)
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
        epoch_acc += acc.item()
    return epoch_loss / len(iterator), epoch_acc / len(iterator)


def evaluate(model, iterator, criterion):
    epoch_loss = 0
    epoch_acc = 0
    model.eval()
    with torch.no_grad():
        for batch in iterator:
            text, lengths, label = batch
            predictions = model(text, lengths)
            epoch_loss += criterion(predictions, label).item()
            epoch_acc += binary_accuracy(predictions, label).item()
    return epoch_loss / len(iterator), epoch_acc / len(iterator)


N_EPOCHS = 3
torch.manual_seed(8)
train_data, valid_data = Parity(320, 1), Parity(96, 2)
weights = [2.0 if label else 1.0 for _, label in train_data.items]
sampler = WeightedRandomSampler(weights, num_samples=len(weights), replacement=True)
train_iterator = DataLoader(train_data, batch_size=16, sampler=sampler, collate_fn=collate_fn)
valid_iterator = DataLoader(valid_data, batch_size=16, collate_fn=collate_fn)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
best_valid_loss = float("inf")
for epoch in range(N_EPOCHS):
    train_loss, train_acc = train(model, train_iterator, optimizer, criterion)
    valid_loss, valid_acc = evaluate(model, valid_iterator, criterion)
    if valid_loss < best_valid_loss:
        best_valid_loss = valid_loss
        torch.save(model.state_dict(), "tut-model.pt")
    print(f"\tTrain Loss: {train_loss:.6f} | Train Acc: {train_acc * 100:.3f}%")
    print(f"\t Val. Loss: {valid_loss:.6f} |  Val. Acc: {valid_acc * 100:.3f}%")
