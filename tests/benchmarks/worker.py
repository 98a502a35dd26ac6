"""A worker that sends when it started and measured, or fails or skips on request."""

import sys
import time

from benchmarks import workers

if __name__ == "__main__":
    name, how = sys.argv[1:]
    started = time.time()
    print("noise")
    if how == "dies early":
        sys.exit("no")
    if how == "skips":
        workers.skip("no such device")
        sys.exit()
    if how == "compiles too long":
        time.sleep(60)
    if workers.my_turn("version 9" * (how == "names a version")):
        turn = time.time()
        workers.send([name, started, turn])
        if how == "dies late":
            sys.exit("no")
        if how == "hangs":
            time.sleep(60)
        time.sleep(0.05)
        workers.send({"end": time.time()})
