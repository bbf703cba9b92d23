"""`/health`, `/metrics`, `/v1/models` and `/v1/config`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from legato.engine.service import EngineService
from legato.server.problems import Problem, problem_response
from legato.server.served import ServedModel
from legato.server.terms import Admission


class Status:
    """The endpoints that answer from what the server knows, without the engine."""

    def __init__(self, service: EngineService, model: ServedModel, admission: Admission) -> None:
        self._service = service
        self._admission = admission
        self._model = model

    async def health(self, request: Request) -> Response:
        """200 while the engine process lives, else 503 with the reason."""
        if self._service.alive:
            return _json({"status": "ok"})
        return _json({"status": "engine gone", "reason": str(self._service.failure or "")}, 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        page = self._service.metrics.render(self._model.name, self._service.info)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """The model by name, or a 404."""
        try:
            self._model.check_name(request.path_params["name"])
        except Problem as problem:
            return problem_response(problem)
        return _json(self._card())

    async def config(self, request: Request) -> Response:
        """What the engine is, and what it promises at this machine's speed."""
        info, pace = self._service.info, self._service.metrics.last_step.pace
        return _json(
            {
                "model": self._model.name,
                "description": info.description,
                "itl_ms": round(1000 * info.itl_s, 3) if info.itl_s else None,
                "promise": info.promise or None,
                "prefill_share": info.prefill_share,
                "prefer": info.prefer,
                "policy": info.policy or None,
                "ttft_ms": round(1000 * info.ttft_s, 3) if info.ttft_s else None,
                "shed": self._admission.shed,
                "tenant_header": self._admission.tenant_header,
                "tenant_weights": info.tenant_weights,
                "long_prefill_token_threshold": info.long_prefill_token_threshold,
                "max_num_partial_prefills": info.max_num_partial_prefills,
                "async_scheduling": info.async_scheduling,
                "pace": {
                    "prediction_error_median": pace.median_error,
                    "prediction_error_p95": pace.p95_error,
                    "margin": pace.margin,
                    "machine_slowdown": pace.scale,
                    "late_tokens": pace.late,
                    "most_streams": info.most_streams,
                    "gap_now_ms": round(1000 * pace.decode_s, 3),
                    "prompt_of_1000_tokens_now_s": round(1000 * (pace.token_s or info.token_s), 3),
                }
                if info.itl_s
                else None,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                "max_num_seqs": info.max_num_seqs,
                "max_model_len": info.context,
                "kv_tokens": info.kv_tokens,
                "block_tokens": info.block_tokens,
                "prefix_caching": info.prefix_caching,
                "threads": info.threads,
            }
        )

    def _card(self) -> dict[str, object]:
        info = self._service.info
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "legato",
            "max_model_len": info.context,
        }


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
