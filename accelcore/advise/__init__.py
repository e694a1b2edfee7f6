"""Find by trials which precision a script should train in: `accelcore advise`.

    rule      which trials to run, in which order, and what is recommended
    trials    one trial: the unchanged script in a child process, and its record

The script's side of a trial is `training/trial.py`; the table, the page and JSON are in `cli/advise.py`.
"""
