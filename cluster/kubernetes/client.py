"""The few calls of the official Kubernetes client that jobs need; answers are plain dicts, as in the REST API.

The client (pip install kubernetes) is imported where it is used. Standard library otherwise.
"""

import json
import os
from importlib import import_module
from typing import Any

from cluster.kubernetes.manifest import JOB_SET_API, MANAGED_BY
from cluster.record import cut
from cluster.state import JobError

SELECTOR = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
TIMEOUT_S = 20.0


class Cluster:
    """One cluster, spoken to through the official client; answers are plain dicts, as in the REST API."""

    def __init__(self, context: str | None = None) -> None:
        try:
            self.client, config = import_module("kubernetes.client"), import_module("kubernetes.config")
        except ImportError as error:
            raise JobError(
                "Kubernetes needs its official client, which is not installed. Run: pip install kubernetes. "
                "Or apply what `kit launch ... --show` prints with kubectl."
            ) from error
        self.context = context or ""
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and not context and not os.environ.get("KUBECONFIG"):
                inside = self.client.Configuration()
                config.load_incluster_config(client_configuration=inside)
                api = self.client.ApiClient(inside)
            else:
                self.context = context or config.list_kube_config_contexts()[1]["name"]
                api = config.new_client_from_config(context=self.context)
        except config.ConfigException as error:
            raise JobError(f"no Kubernetes cluster is configured here: {error}. Set KUBECONFIG.") from error
        self.batch, self.core = self.client.BatchV1Api(api), self.client.CoreV1Api(api)
        self.custom = self.client.CustomObjectsApi(api)

    def create(self, items: list[dict], namespace: str) -> str:
        """Creates a Job or JobSet and what belongs to it, which goes when it goes; returns its id."""
        first, *others = items
        created = self._create(first, namespace)
        metadata = created["metadata"]
        owner = {key: first[key] for key in ("apiVersion", "kind")} | {"name": metadata["name"], "uid": metadata["uid"]}
        job_id = f"{first['kind'].lower()}/{metadata['name']}"
        try:
            for item in others:
                self._create({**item, "metadata": {**item["metadata"], "ownerReferences": [owner]}}, namespace)
        except JobError:
            self.delete(job_id, namespace)
            raise
        return job_id

    def _create(self, item: dict, namespace: str) -> dict:
        if item["kind"] == "JobSet":
            create = self.custom.create_namespaced_custom_object
            return self._ask(create, *_job_set(namespace), item, field_validation="Strict")
        create = {
            "Job": self.batch.create_namespaced_job,
            "Service": self.core.create_namespaced_service,
            "ConfigMap": self.core.create_namespaced_config_map,
        }[item["kind"]]
        return self._ask(create, namespace, item, field_validation="Strict")

    def list_pods(self, namespace: str) -> list[dict]:
        """Returns the pods of all jobs made here."""
        return self._ask(self.core.list_namespaced_pod, namespace, label_selector=SELECTOR)["items"]

    def list_jobs(self, kind: str, namespace: str) -> list[dict]:
        """Returns all jobs made here, of kind job or jobset."""
        if kind == "jobset":
            listing = self.custom.list_namespaced_custom_object
            return self._ask(listing, *_job_set(namespace), label_selector=SELECTOR)["items"]
        return self._ask(self.batch.list_namespaced_job, namespace, label_selector=SELECTOR)["items"]

    def delete(self, job_id: str, namespace: str) -> None:
        """Deletes a job and what belongs to it; one that is gone already is fine."""
        kind, name = job_id.split("/")
        try:
            if kind == "jobset":
                delete = self.custom.delete_namespaced_custom_object
                self._ask(delete, *_job_set(namespace), name, propagation_policy="Background")
            else:
                delete = self.batch.delete_namespaced_job
                self._ask(delete, name, namespace, propagation_policy="Background")
        except JobError as error:
            if "(404)" not in str(error):
                raise

    def _ask(self, method: Any, *arguments: Any, **options: Any) -> dict:
        """Returns the answer as plain dicts.

        Raises:
            JobError: the manifest is not valid, or the cluster refuses or cannot be reached; with its own words.
        """
        try:
            # Not preloaded: the client's models refuse fields that a newer cluster answers with.
            answer = method(*arguments, _request_timeout=TIMEOUT_S, _preload_content=False, **options)
            return json.loads(answer.data)
        except self.client.ApiException as error:
            raise JobError(f"Kubernetes refuses ({error.status}): {_message(error)}") from error
        except Exception as error:  # connection and validation errors of several packages
            raise JobError(f"Kubernetes cannot be asked: {cut(' '.join(str(error).split()), 500)}") from error


def _job_set(namespace: str) -> tuple[str, str, str, str]:
    group, version = JOB_SET_API.split("/")
    return group, version, namespace, "jobsets"


def _message(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
