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
    # TODO(accelcore): cuda of an object that is not known
    return torch.cuda.is_available()


def g():
    torch = torch_like
    # TODO(accelcore): cuda of an object that is not known
    return torch.cuda.is_available()


# TODO(accelcore): a word for one vendor's devices that no rule knows: see what other devices need here
cuda = {"cuda": 1}
# TODO(accelcore): this file defines a method cuda, which may be the one that is called
print(Camera().cuda(), f(torch_like), g(), cuda["cuda"], f"cuda {1}")
"cuda"
model = torch.nn.Linear(2, 1)
loss = model(torch.zeros(1, 2)).sum()
loss.backward()
