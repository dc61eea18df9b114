"""Two models that train against each other, with an optimizer each and two backward passes for the discriminator."""

import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

manualSeed = 999
torch.manual_seed(manualSeed)
batch_size, nz, num_epochs = 20, 4, 3
out_dir = "samples"
os.makedirs(out_dir, exist_ok=True)

angles = torch.rand(200, generator=torch.Generator().manual_seed(0)) * 6.2832
real_points = torch.stack((angles.cos(), angles.sin()), dim=1)
dataset = TensorDataset(real_points)
dataloader = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Generator(nn.Module):
    def __init__(self):
        super(Generator, self).__init__()
        self.main = nn.Sequential(nn.Linear(nz, 16), nn.ReLU(True), nn.Linear(16, 2))

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super(Discriminator, self).__init__()
        self.main = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, input):
        return self.main(input).view(-1)


netG = Generator().to(device)
netD = Discriminator().to(device)
criterion = nn.BCELoss()
fixed_noise = torch.randn(8, nz, device=device)
real_label, fake_label = 1.0, 0.0
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.01, betas=(0.5, 0.999))

G_losses, D_losses = [], []
for epoch in range(num_epochs):
    for i, data in enumerate(dataloader, 0):
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real_cpu = data[0].to(device)
        b_size = real_cpu.size(0)
        label = torch.full((b_size,), real_label, dtype=torch.float, device=device)
        output = netD(real_cpu).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        noise = torch.randn(b_size, nz, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        D_G_z1 = output.mean().item()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) Update G: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        D_G_z2 = output.mean().item()
        optimizerG.step()

        if i % 5 == 0:
            print(
                "[%d/%d][%d/%d]\tLoss_D: %.6f\tLoss_G: %.6f\tD(x): %.4f\tD(G(z)): %.4f / %.4f"
                % (epoch, num_epochs, i, len(dataloader), errD.item(), errG.item(), D_x, D_G_z1, D_G_z2)
            )
        G_losses.append(errG.item())
        D_losses.append(errD.item())

    with torch.no_grad():
        sample = netG(fixed_noise).detach().cpu()
    with open("%s/epoch_%03d.txt" % (out_dir, epoch), "w") as f:
        for point in sample.tolist():
            f.write("%.5f %.5f\n" % tuple(point))
    torch.save(netG.state_dict(), "%s/netG_epoch_%d.pth" % (out_dir, epoch))
print("mean losses", sum(G_losses) / len(G_losses), sum(D_losses) / len(D_losses))
