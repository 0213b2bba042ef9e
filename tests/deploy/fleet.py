# SPDX-License-Identifier: Apache-2.0
"""Nodes under load with a common etcd, each with its own engine, and the Prometheus that scrapes them."""

import dataclasses
import os
import pathlib
import shutil
import subprocess

import load
import monitoring

import ashlar.daemon


class Etcd:
    def __init__(self, folder):
        self.address = f"127.0.0.1:{monitoring.free_port()}"
        peers = f"http://127.0.0.1:{monitoring.free_port()}"
        self._command = [
            "etcd",
            "--name=trial",
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls=http://{self.address}",
            f"--advertise-client-urls=http://{self.address}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=trial={peers}",
        ]
        self.start()

    def start(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self):
        self._process.kill()
        self._process.wait()


@dataclasses.dataclass
class Node:
    name: str
    daemon: ashlar.daemon.Daemon
    port: int  # port of its metrics
    load: load.Load


class Fleet:
    """Two nodes that fetch from each other; if etcd is not installed, one node, and `etcd` is None. If root runs it,
    each node has engines of two tenants. Metrics name tenants, and checksums are verified in the background."""

    def __init__(self, folder, cleanup, first_disk=None, **prometheus):
        """`folder` must exist, and so must `second` in it if another user runs the daemons. `prometheus`: additional
        options."""
        self.etcd = None
        if shutil.which("etcd"):
            self.etcd = Etcd(folder)
            cleanup.callback(self.etcd.stop)
        self.nodes = []
        self._start_node("node-a", folder, first_disk, cleanup)
        if self.etcd is not None:
            second = pathlib.Path(folder, "second")
            second.mkdir(exist_ok=True)
            self._start_node("node-b", str(second), None, cleanup)
        self.prometheus = monitoring.Prometheus(folder, [f"127.0.0.1:{node.port}" for node in self.nodes], **prometheus)
        cleanup.callback(self.prometheus.stop)

    def _start_node(self, name, folder, disk, cleanup):
        sections = {"metrics": {"tenants": "named"}, "scrub": {"bytes_per_second": "4MiB"}}
        if self.etcd is not None:
            sections["cluster"] = {
                "node": name,
                "control_address": f"127.0.0.1:{monitoring.free_port()}",
                "transport_address": f"127.0.0.1:{monitoring.free_port()}",
                "tls": {"insecure": True},
                "announce": "all",
                "etcd": {"endpoints": [self.etcd.address]},
            }
        daemon, port = load.start_daemon(folder, disk, **sections)
        cleanup.callback(daemon.stop)
        engine = load.Load(daemon.rpc_socket, daemon.session_socket, seed=len(self.nodes))
        cleanup.callback(engine.stop)
        if os.geteuid() == 0:
            pathlib.Path(folder).chmod(0o711)  # the other user reaches the sockets through it
            cleanup.callback(load.Neighbour(daemon.rpc_socket, daemon.session_socket, seed=100 + len(self.nodes)).stop)
        self.nodes.append(Node(name, daemon, port, engine))
