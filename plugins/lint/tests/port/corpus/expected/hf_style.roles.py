import logging
from types import SimpleNamespace

import torch
from torch import nn
import accelcore

logger = logging.getLogger(__name__)
n_gpu = torch.get_device_module(torch.accelerator.current_accelerator()).device_count() if torch.accelerator.current_accelerator() else 0
accel = accelcore.select()
device = accel.device
torch.manual_seed(42)


class Classifier(nn.Module):
    """Returns an object with a loss, as the models of transformers do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids).mean(1))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


model = Classifier().to(device)
no_decay = ["bias"]
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = accel.optimizers.create("adamw", groups, lr=5e-3, eps=1e-8)
dataloader = [{"input_ids": torch.randint(30, (4, 6)), "labels": torch.randint(3, (4,))} for _ in range(3)]

model.train()
for step, batch in enumerate(dataloader):
    batch = {k: v.to(device) for k, v in batch.items()}
    outputs = model(**batch)
    loss = outputs.loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()
    logger.info("step %d", step)
    print("loss", loss.item())
