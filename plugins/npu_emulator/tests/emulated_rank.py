"""What a rank does, from its start to its end."""

import os
import traceback


def main(connection, function, variables, arguments):
    os.environ.update(variables)
    try:
        connection.send((function(*arguments), ""))
    except Exception:  # noqa: BLE001  # the parent shows it
        connection.send((None, traceback.format_exc()))
