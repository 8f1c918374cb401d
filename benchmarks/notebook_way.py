"""ResNet18 on ants and bees as notebooks do it: what benchmarks/training.py compares ours with.

float32, default layout, pictures decoded at every access in the process that trains.

    torchrun --nproc-per-node 2 benchmarks/notebook_way.py DATA WEIGHTS EPOCHS BATCH LR SEED
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

data, weights, epochs, batch, lr, seed = sys.argv[1:]
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
dist.init_process_group("nccl" if gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
start = time.monotonic()

normal = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
augment = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
middle = [transforms.Resize(256), transforms.CenterCrop(224)]
loaders, samplers = {}, {}
for part, how in (("train", augment), ("val", middle)):
    transform = transforms.Compose([*how, transforms.ToTensor(), normal])
    pictures = datasets.ImageFolder(os.path.join(data, part), transform)
    samplers[part] = DistributedSampler(pictures, shuffle=part == "train", seed=int(seed))
    loaders[part] = DataLoader(pictures, int(batch), sampler=samplers[part])

torch.manual_seed(int(seed))
model = models.resnet18(num_classes=2)
model.load_state_dict(torch.load(weights))
model = DistributedDataParallel(model.to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=float(lr), momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
loss_function = nn.CrossEntropyLoss()
for epoch in range(int(epochs)):
    samplers["train"].set_epoch(epoch)
    for part in ("train", "val"):
        model.train(part == "train")
        totals = torch.zeros(2, device=device)
        for images, labels in loaders[part]:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.set_grad_enabled(part == "train"):
                outputs = model(images)
                loss = loss_function(outputs, labels)
            if part == "train":
                loss.backward()
                optimizer.step()
            totals += torch.tensor([(outputs.argmax(1) == labels).sum(), len(labels)]).to(device)
        dist.all_reduce(totals)
    schedule.step()
if dist.get_rank() == 0:
    seconds = time.monotonic() - start
    seen = len(loaders["train"].dataset) * int(epochs)
    accuracy = (totals[0] / totals[1]).item()
    print(json.dumps({"pictures_per_second": seen / seconds, "val_accuracy": accuracy}))
dist.barrier()
os._exit(0)  # the end is not what is measured
