"""Names that look like torch's, and are not: nothing here is a vendor's."""
import torch


class Camera:
    def cuda(self):
        return "barracuda"


class torch_like:
    class cuda:
        @staticmethod
        def is_available():
            return False


def f(torch):
    return torch.cuda.is_available()


def g():
    torch = torch_like
    return torch.cuda.is_available()


cuda = {"cuda": 1}
print(Camera().cuda(), f(torch_like), g(), cuda["cuda"], f"cuda {1}")
"cuda"
model = torch.nn.Linear(2, 1)
loss = model(torch.zeros(1, 2)).sum()
loss.backward()
