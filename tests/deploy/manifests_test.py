#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renders the Kubernetes manifests, and checks them against three versions' schemas, policies, and the daemon itself.

usage: manifests_test.py SOURCE_ROOT ASHLARD
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import kubernetes_validate
    import yaml
except ImportError:
    kubernetes_validate = None

ROOT, ASHLARD = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
OVERLAYS = ("base", "overlays/tcp", "overlays/rdma", "overlays/gpu", "overlays/gpu-tcp", "overlays/gpu-rdma")
SECCOMP = "base with components/seccomp"
VERSIONS = 3  # the latest known versions
# Kinds that Kubernetes' own schemas do not have, with the fields that their definitions require.
CUSTOM = {
    "PodMonitor": lambda spec: spec["selector"] and all(point["port"] for point in spec["podMetricsEndpoints"]),
    "PrometheusRule": lambda spec: all(
        rule["expr"] and ("record" in rule or rule["annotations"]["runbook_url"])
        for group in spec["groups"]
        if group["name"]
        for rule in group["rules"]
    ),
    "Issuer": lambda spec: spec["ca"]["secretName"],
    "Certificate": lambda spec: spec["secretName"] and spec["issuerRef"]["name"] and spec["commonName"],
}


def latest_versions():
    folder = pathlib.Path(kubernetes_validate.__file__).parent
    names = {part for path in folder.rglob("v1.*") for part in path.parts if part.startswith("v1.")}
    known = sorted({tuple(int(each) for each in name.lstrip("v").split("-")[0].split(".")[:2]) for name in names})
    return [f"{major}.{minor}" for major, minor in known[-VERSIONS:]]


@unittest.skipUnless(kubernetes_validate, "kubernetes-validate and PyYAML are not installed (PyPI)")
@unittest.skipUnless(shutil.which("kubectl"), "kubectl is not installed")
class Manifests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rendered, cls.warned = {}, {}
        for overlay in OVERLAYS:
            done = subprocess.run(
                ["kubectl", "kustomize", ROOT / "deploy/kustomize" / overlay],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise AssertionError(f"{overlay}: {done.stderr}")
            cls.warned[overlay] = done.stderr
            cls.rendered[overlay] = list(yaml.safe_load_all(done.stdout))
        cls.rendered[SECCOMP] = cls.with_component("components/seccomp")
        cls.rendered["engine-pod"] = [yaml.safe_load((ROOT / "deploy/kustomize/engine-pod.yaml").read_text())]

    @classmethod
    def with_component(cls, component):
        """Renders the base with one component, as a user's own kustomization includes it."""
        with tempfile.TemporaryDirectory() as folder:
            here = os.path.relpath(ROOT / "deploy/kustomize", os.path.realpath(folder))
            pathlib.Path(folder, "kustomization.yaml").write_text(
                "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
                f"resources: [{here}/base]\ncomponents: [{here}/{component}]\n"
            )
            done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise AssertionError(f"{component}: {done.stderr}")
            return list(yaml.safe_load_all(done.stdout))

    def objects(self, kind=None):
        for overlay, objects in self.rendered.items():
            for each in objects:
                if kind in (None, each["kind"]):
                    yield f"{overlay} {each['kind']}/{each['metadata']['name']}", each

    def pods(self):
        for name, each in self.objects("DaemonSet"):
            yield name, each["spec"]["template"]["spec"]
        for name, each in self.objects("Pod"):
            yield name, each["spec"]

    def test_they_are_valid_in_three_versions(self):
        versions, valid, custom, known = latest_versions(), 0, 0, set()
        self.assertEqual(len(versions), VERSIONS)
        for name, each in self.objects():
            if each["kind"] in CUSTOM:
                self.assertTrue(CUSTOM[each["kind"]](each["spec"]), name)
                custom += 1
                continue
            text = json.dumps(each)
            for version in versions if text not in known else ():  # overlays share most of their objects
                kubernetes_validate.validate(each, version, strict=True)
            known.add(text)
            valid += len(versions)
        print(f"{valid} objects valid in {', '.join(versions)}; {custom} custom ones have their required fields")

    def test_they_render_without_warnings(self):
        """A warning shows fields that a later kustomize no longer reads."""
        self.assertEqual({name: text for name, text in self.warned.items() if text}, {})

    def test_a_wrong_manifest_is_found(self):
        _, daemon_set = next(self.objects("DaemonSet"))
        wrong = json.loads(json.dumps(daemon_set))
        wrong["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["httpGet"]["prot"] = 1
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, latest_versions()[-1], strict=True)

    def test_containers_have_minimal_rights(self):
        for name, pod in self.pods():
            self.assertFalse(pod.get("hostNetwork") or pod.get("hostPID") or pod.get("hostIPC"), name)
            self.assertTrue(pod["securityContext"]["runAsNonRoot"], name)
            self.assertEqual(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", name)
            for container in pod["containers"] + pod.get("initContainers", []):
                rights = container["securityContext"]
                self.assertFalse(rights.get("privileged", False), name)
                self.assertFalse(rights["allowPrivilegeEscalation"], name)
                self.assertEqual(rights["capabilities"]["drop"], ["ALL"], name)
                # A capability that is added for a user other than root never takes effect.
                allowed = {"CHOWN", "FOWNER"} if container["name"] == "folders" else set()
                self.assertEqual(set(rights["capabilities"].get("add", [])), allowed, name)
                profile = rights.get("seccompProfile")
                if name.startswith(SECCOMP) and container["name"] == "ashlard":
                    self.assertEqual(profile["type"], "Localhost", name)
                    folder, file = profile["localhostProfile"].split("/")
                    self.assertEqual(folder, "ashlar", "as deploy/kustomize/README.md says")
                    self.assertTrue((ROOT / "deploy/nodes/seccomp" / file).exists(), name)
                else:
                    self.assertIsNone(profile, "the pod's")
                if rights.get("runAsUser") == 0:
                    self.assertEqual(container["name"], "folders", name)
                self.assertIn("memory", container["resources"]["limits"], name)
                self.assertIn("cpu", container["resources"]["requests"], name)
                self.assertNotIn(":latest", container["image"])

    def test_the_daemon_is_probed_drained_and_updated_one_node_at_a_time(self):
        for name, each in self.objects("DaemonSet"):
            self.assertEqual(each["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"], 1, name)
            self.assertGreaterEqual(
                each["spec"]["minReadySeconds"], 30, f"{name}: peers connect before the next one stops"
            )
            pod = each["spec"]["template"]["spec"]
            container = next(container for container in pod["containers"] if container["name"] == "ashlard")
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                self.assertEqual(container[probe]["httpGet"]["port"], "metrics", name)
            drain = container["lifecycle"]["preStop"]["exec"]["command"]
            self.assertEqual(drain[:3], ["ashlarctl", "drain", "--seconds"], name)
            config = yaml.safe_load(self.config_of(name))
            self.assertGreater(pod["terminationGracePeriodSeconds"], int(drain[3]) + config["drain_seconds"], name)
            self.assertTrue(container["securityContext"]["readOnlyRootFilesystem"], name)

    def test_etcd_is_called_over_tls(self):
        """Every file that a configuration names below /etc/ashlar is mounted there."""
        for name, each in self.objects("DaemonSet"):
            config = yaml.safe_load(self.config_of(name)).get("cluster")
            if config is None:
                continue
            container = each["spec"]["template"]["spec"]["containers"][0]
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            for section in ("tls", "etcd"):
                for file in ("ca_file", "cert_file", "key_file"):
                    self.assertIn(
                        str(pathlib.PurePath(config[section][file]).parent), mounts, f"{name}: {section}.{file}"
                    )

    def test_engines_reach_two_sockets_but_not_the_admin_socket(self):
        """The creator of an engine's pod chooses its user, so mode 0600 alone does not exclude the daemon's own user."""
        engine = next(pod for name, pod in self.pods() if name.startswith("engine-pod "))
        mounts = engine["containers"][0]["volumeMounts"]
        self.assertTrue(all(mount["readOnly"] for mount in mounts))
        shared = {volume["hostPath"]["path"] for volume in engine["volumes"]}
        for name, each in self.objects("DaemonSet"):
            listen = yaml.safe_load(self.config_of(name))["listen"]
            for field in ("rpc_socket", "session_socket"):
                self.assertIn(str(pathlib.PurePath(listen[field]).parent), shared, name)
            pod = each["spec"]["template"]["spec"]
            place = next(
                mount["name"]
                for mount in pod["containers"][0]["volumeMounts"]
                if mount["mountPath"] == str(pathlib.PurePath(listen["admin_socket"]).parent)
            )
            self.assertIn("emptyDir", next(volume for volume in pod["volumes"] if volume["name"] == place), name)
            self.assertIn(
                {"name": "ASHLAR_ADMIN_SOCKET", "value": listen["admin_socket"]}, pod["containers"][0]["env"], name
            )

    def test_an_engine_starts_on_a_node_without_a_daemon(self):
        """The kubelet creates the folder, owned by root, for the first pod; the daemon's init container takes over the
        same folder."""
        engine = next(pod for name, pod in self.pods() if name.startswith("engine-pod "))
        wanted = [volume["hostPath"] for volume in engine["volumes"]]
        self.assertEqual(wanted, [{"path": "/run/ashlar", "type": "DirectoryOrCreate"}])
        for name, each in self.objects("DaemonSet"):
            pod = each["spec"]["template"]["spec"]
            self.assertIn(wanted[0], [volume.get("hostPath") for volume in pod["volumes"]], name)
            context = pod["securityContext"]
            done = pod["initContainers"][0]["args"][0]
            self.assertRegex(
                done,
                rf"^chown {context['runAsUser']}:{context['runAsGroup']} /run/ashlar .*&& chmod 0750 /run/ashlar ",
                name,
            )
            self.assertIn(context["runAsGroup"], engine["securityContext"]["supplementalGroups"], name)
            self.assertNotRegex(done, r"\brm\b", "a folder that is made anew is not the one that engines have mounted")

    def test_metrics_name_tenants_and_only_prometheus_reads_them(self):
        for name, each in self.objects("DaemonSet"):
            self.assertEqual(yaml.safe_load(self.config_of(name))["metrics"]["tenants"], "named", name)
            rendered = self.rendered[name.rsplit(" DaemonSet/")[0]]
            guard = next(
                other
                for other in rendered
                if other["kind"] == "NetworkPolicy" and other["metadata"]["name"] == "ashlard"
            )
            self.assertEqual(
                guard["spec"]["podSelector"]["matchLabels"], each["spec"]["template"]["metadata"]["labels"]
            )
            self.assertEqual(
                [rule["from"] for rule in guard["spec"]["ingress"]],
                [[{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]],
            )
        row = re.search(r"^\| local user of no tenant \|.*$", (ROOT / "SECURITY.md").read_text(), re.M)[0]
        for setting in ("`metrics.tenants: summed`", "`named`"):
            self.assertIn(setting, row, "who can read tenants' names depends on it")

    def test_the_daemons_group_may_read_secrets(self):
        """Kubernetes makes a secret's files root's, of the group fsGroup: without it another user cannot read them."""
        found = 0
        for name, each in self.objects("DaemonSet"):
            pod = each["spec"]["template"]["spec"]
            modes = [
                volume[kind]["defaultMode"]
                for volume in pod["volumes"]
                for kind in ("secret", "projected")
                if kind in volume
            ]
            for mode in modes:
                self.assertEqual(mode & 0o7, 0, f"{name}: other users cannot read keys")
                self.assertTrue(mode & 0o40, name)
                self.assertEqual(pod["securityContext"].get("fsGroup"), pod["securityContext"]["runAsGroup"], name)
                found += 1
        self.assertGreater(found, 0)

    def test_every_value_of_the_configurations_is_described(self):
        page = (ROOT / "deploy/kustomize/README.md").read_text() + (ROOT / "deploy/ashlard.example.yaml").read_text()

        def names(value):
            for key, inner in value.items() if isinstance(value, dict) else ():
                yield key
                yield from names(inner)

        for overlay in OVERLAYS:
            for name in names(yaml.safe_load(self.config_of(overlay))):
                self.assertIn(name, page, overlay)

    def config_of(self, name):
        """Returns the configuration of an overlay, or of an object by its name in `objects`."""
        maps = [each for each in self.rendered[name.rsplit(" DaemonSet/")[0]] if each["kind"] == "ConfigMap"]
        self.assertEqual(len(maps), 1)
        return maps[0]["data"]["ashlard.yaml"]

    def test_the_daemon_accepts_every_configuration(self):
        environment = {**os.environ, "NODE_NAME": "node-a", "POD_IP": "10.0.0.7"}
        for overlay in OVERLAYS:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                file.write(self.config_of(overlay))
                file.flush()
                done = subprocess.run(
                    [ASHLARD, "--config", file.name, "--check-config"],
                    capture_output=True,
                    text=True,
                    check=False,
                    env=environment,
                )
                self.assertEqual(done.returncode, 0, f"{overlay}: {done.stderr}")
                self.assertEqual(yaml.safe_load(done.stdout)["listen"]["metrics_address"], "0.0.0.0:9464")

    def test_the_pages_rules_for_other_dns_are_accepted(self):
        page = (
            (ROOT / "deploy/kustomize/README.md")
            .read_text()
            .split("\n## What your platform may need\n")[1]
            .split("\n## ")[0]
        )
        rules = [yaml.safe_load(text)[0] for text in re.findall(r"`(- \{to: .*?)`", page)]
        ports = [{port["port"] for port in rule["ports"]} for rule in rules]
        self.assertEqual(ports, [{53}, {5353}])
        policy = next(
            each
            for each in self.rendered["overlays/tcp"]
            if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "ashlard-peers"
        )
        changed = json.loads(json.dumps(policy))
        changed["spec"]["egress"] += rules
        for version in latest_versions():
            kubernetes_validate.validate(changed, version, strict=True)
        self.assertEqual({port["protocol"] for rule in rules for port in rule["ports"]}, {"UDP", "TCP"})

    def test_the_pages_variant_for_ipv6_is_accepted(self):
        command = re.search(
            r"`sed -i '([^']*POD_IP[^']*)' ashlard.yaml`", (ROOT / "deploy/kustomize/README.md").read_text()
        )[1]
        for overlay in OVERLAYS:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                file.write(self.config_of(overlay))
                file.flush()
                check = [ASHLARD, "--config", file.name, "--check-config"]
                ask = {
                    "capture_output": True,
                    "text": True,
                    "check": False,
                    "env": {**os.environ, "NODE_NAME": "node-a", "POD_IP": "fd00::7"},
                }
                if "cluster" in yaml.safe_load(self.config_of(overlay)):
                    self.assertIn("control_address", subprocess.run(check, **ask).stderr, "as the page says")
                subprocess.run(["sed", "-i", command, file.name], check=True)
                done = subprocess.run(check, **ask)
                self.assertEqual(done.returncode, 0, f"{overlay}: {done.stderr}")
                self.assertNotIn("0.0.0.0", done.stdout, overlay)

    def test_install_commands_create_what_pods_wait_for(self):
        page = (ROOT / "deploy/kustomize/README.md").read_text().split("\n## Install\n")[1].split("\n## ")[0]
        made = {
            name: set(re.findall(r"--from-file=(\S+)|--(cert|key)=", files))
            for name, files in re.findall(
                r"^kubectl -n ashlar create (?:secret tls|secret generic|configmap) (\S+) (.*)$", page, re.M
            )
        }
        rendered = self.rendered["overlays/tcp"]
        pod = next(pod for name, pod in self.pods() if name.startswith("overlays/tcp "))
        waits = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        waits |= {
            source["configMap"]["name"]
            for volume in pod["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "configMap" in source
        }
        waits |= {each["spec"]["ca"]["secretName"] for each in rendered if each["kind"] == "Issuer"}
        self.assertEqual(set(made), waits)
        etcd = yaml.safe_load(self.config_of("overlays/tcp"))["cluster"]["etcd"]
        self.assertEqual(
            {file for file, _ in made["ashlar-etcd"]},
            {pathlib.PurePath(etcd[field]).name for field in ("ca_file", "cert_file", "key_file")},
        )
        self.assertEqual(next(each["metadata"]["name"] for each in rendered if each["kind"] == "Namespace"), "ashlar")
        self.assertIn("\nkubectl apply -f deploy/kustomize/base/namespace.yaml\n", page, "secrets need it")

    def test_the_pages_command_writes_the_list_of_authorities(self):
        page = (
            (ROOT / "deploy/kustomize/README.md")
            .read_text()
            .split("\n## Changing the authority\n")[1]
            .split("\n## ")[0]
        )
        command = re.search(r"^(kubectl .*) \| kubectl apply -f -$", page, re.M)[1]
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "ca.crt").write_text("old\nnew\n")
            made = yaml.safe_load(
                subprocess.run(command.split(), cwd=folder, capture_output=True, text=True, check=True).stdout
            )
        self.assertEqual((made["kind"], made["data"]), ("ConfigMap", {"ca.crt": "old\nnew\n"}))
        pod = next(pod for name, pod in self.pods() if name.startswith("overlays/tcp "))
        sources = [source for volume in pod["volumes"] for source in volume.get("projected", {}).get("sources", [])]
        self.assertIn(
            {"configMap": {"name": made["metadata"]["name"], "items": [{"key": "ca.crt", "path": "ca.crt"}]}}, sources
        )

    def test_alerts_send_people_to_one_address(self):
        """The address in runbooks.yaml, which is not deployed itself."""
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(shutil.copytree(ROOT / "deploy/kustomize/base", pathlib.Path(folder, "base")))
            file, placeholder = copy / "runbooks.yaml", "https://ashlar.example/docs/runbooks.md"
            self.assertIn(placeholder, file.read_text())
            file.write_text(file.read_text().replace(placeholder, "https://wiki.here/ashlar"))
            done = subprocess.run(["kubectl", "kustomize", copy], capture_output=True, text=True, check=True)
        rules = next(each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "PrometheusRule")
        alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
        self.assertGreater(len(alerts), 15)
        for alert in alerts:
            self.assertEqual(alert["annotations"]["runbook_url"], f"https://wiki.here/ashlar#{alert['alert'].lower()}")

    def test_a_gpu_cluster_is_the_cluster_with_gpus(self):
        for overlay, plain in (
            ("overlays/gpu", "base"),
            ("overlays/gpu-tcp", "overlays/tcp"),
            ("overlays/gpu-rdma", "overlays/rdma"),
        ):
            config = yaml.safe_load(self.config_of(overlay))
            self.assertTrue(config.pop("gpu"), overlay)
            of_plain = yaml.safe_load(self.config_of(plain))
            for each in config, of_plain:
                each.pop("sandbox")
            self.assertEqual(config, of_plain, overlay)
            pod = next(each for name, each in self.pods() if name.startswith(f"{overlay} "))
            image, environment = pod["containers"][0]["image"], {each["name"] for each in pod["containers"][0]["env"]}
            self.assertTrue(image.endswith("-cuda"), f"{overlay}: {image}")
            self.assertLessEqual({"NVIDIA_VISIBLE_DEVICES", "NODE_NAME", "POD_IP"}, environment, overlay)
            self.assertEqual(pod["runtimeClassName"], "nvidia", overlay)
            self.assertEqual(
                {each["name"] for each in pod["volumes"]},
                {
                    each["name"]
                    for name, other in self.pods()
                    if name.startswith(f"{plain} ")
                    for each in other["volumes"]
                },
            )

    def test_a_registry_in_the_base_leaves_nodes_with_gpus_their_image(self):
        def image(folder, overlay):
            done = subprocess.run(
                ["kubectl", "kustomize", pathlib.Path(folder, overlay)], capture_output=True, text=True, check=True
            )
            daemon_set = next(each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "DaemonSet")
            return daemon_set["spec"]["template"]["spec"]["containers"][0]["image"]

        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copytree(ROOT / "deploy/kustomize", pathlib.Path(folder, "kustomize"))
            for page, name, registry in (
                ("base", "- name: ashlar\n", "registry.here:5000/ashlar"),
                ("components/gpu", "    newName: ashlar\n", "registry.here:5000/for-gpus"),
            ):
                file = copy / page / "kustomization.yaml"
                self.assertEqual(file.read_text().count(name), 1)
                file.write_text(file.read_text().replace(name, f"{name.split('    new')[0]}    newName: {registry}\n"))
                self.assertTrue(image(copy, "overlays/gpu-tcp").endswith("-cuda"), page)
            self.assertRegex(image(copy, "overlays/tcp"), r"^registry\.here:5000/ashlar:[\d.]+$")
            self.assertRegex(image(copy, "overlays/gpu-tcp"), r"^registry\.here:5000/for-gpus:[\d.]+-cuda$")

    def test_a_pod_starts_without_the_secrets_of_other_nodes(self):
        found = 0
        for name, pod in self.pods():
            for volume in pod["volumes"]:
                for source in volume.get("projected", {}).get("sources", []):
                    if "secret" in source:
                        self.assertIs(source["secret"].get("optional"), True, name)
                        found += 1
        self.assertGreater(found, 0)

    def test_authorities_are_outside_node_secrets(self):
        """A node's secret may be deleted and renewed by another authority before other nodes accept that one. The
        issuer's secret has the authority's key."""
        found = 0
        for name, each in self.objects("DaemonSet"):
            config = yaml.safe_load(self.config_of(name)).get("cluster")
            if config is None:
                continue
            folder, file = (
                pathlib.PurePath(config["tls"]["ca_file"]).parent,
                pathlib.PurePath(config["tls"]["ca_file"]).name,
            )
            pod = each["spec"]["template"]["spec"]
            volume = next(
                mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == str(folder)
            )
            sources = next(each["projected"]["sources"] for each in pod["volumes"] if each["name"] == volume)
            bringing = [
                (kind, value)
                for source in sources
                for kind, value in source.items()
                if file in [item["path"] for item in value["items"]]
            ]
            self.assertEqual(
                [(kind, value["name"]) for kind, value in bringing], [("configMap", "ashlar-authorities")], name
            )
            self.assertFalse(bringing[0][1].get("optional", False), f"{name}: a pod without it would end, and not wait")
            issuers = {
                other["spec"]["ca"]["secretName"]
                for other in self.rendered[name.rsplit(" DaemonSet/")[0]]
                if other["kind"] == "Issuer"
            }
            self.assertFalse(issuers & {source.get("secret", {}).get("name") for source in sources}, name)
            found += 1
        self.assertEqual(found, 4)

    def test_the_sandbox_is_on_where_it_was_tested(self):
        for overlay in OVERLAYS:
            config = yaml.safe_load(self.config_of(overlay))
            untried = "gpu" in config or config.get("cluster", {}).get("expect_transport") == "rdma"
            self.assertIs(config["sandbox"], not untried, overlay)

    def test_memory_limits_cover_the_configuration(self):
        for name, each in self.objects("DaemonSet"):
            config = yaml.safe_load(self.config_of(name))
            dram = int(config["dram"]["capacity_bytes"].removesuffix("GiB"))
            container = each["spec"]["template"]["spec"]["containers"][0]
            self.assertEqual(config["workers"]["threads"], int(container["resources"]["limits"]["cpu"]), name)
            limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
            self.assertGreaterEqual(limit, dram + 12 + 2, f"{name}: models and hosted memory are the daemon's, too")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
