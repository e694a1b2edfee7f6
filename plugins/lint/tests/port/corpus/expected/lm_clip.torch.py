import argparse
import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description='RNN language model')
parser.add_argument('--cuda', action='store_true', default=False, help='use CUDA')
parser.add_argument('--clip', type=float, default=0.25, help='gradient clipping')
parser.add_argument('--seed', type=int, default=1111)
args = parser.parse_args()

# Set the random seed manually for reproducibility.
torch.manual_seed(args.seed)
if torch.accelerator.is_available():
    if not args.cuda:
        print("WARNING: You have a CUDA device, so you should probably run with --cuda.")
accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
device = torch.device(accelerator.type if args.cuda else "cpu")


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).view(-1, self.decoder.out_features), hidden


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


corpus = torch.randint(20, (31, 4)).to(device)
model = RNNModel(20, 8, 16).to(device)
criterion = nn.CrossEntropyLoss()
lr = 1.0


def train():
    model.train()
    hidden = None
    for i in range(0, 30, 10):
        data, targets = corpus[i:i + 10], corpus[i + 1:i + 11].reshape(-1)
        model.zero_grad()
        if hidden is not None:
            hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        # `clip_grad_norm` helps prevent the exploding gradient problem in RNNs / LSTMs.
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        print('loss', loss.item())


train()
if torch.accelerator.is_available():
    torch.get_device_module().empty_cache()
