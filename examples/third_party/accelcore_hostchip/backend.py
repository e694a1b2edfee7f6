"""The backend of hostchip: what torch says of it. Roles that differ come here."""

from accelcore.roles import from_torch


def create(index):
    # Import the package here that registers your device with torch.
    device = "cpu"  # torch's name of yours; until then the host plays it
    return from_torch(device, index, name="hostchip")
