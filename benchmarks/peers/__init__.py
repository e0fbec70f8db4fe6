"""Other libraries beside shoal, on the same machine in the same suite.

    cases.py            checks and runs the cases of a suite that name a peer
    install.py          each peer into a virtual environment of its own under .peers/ (git-ignored)
    drivers/            scripts of ours that run there
    process_monitor.py  what a driver prints and costs
    driver_options.py   what a driver can be told, checked before anything is run
"""
