"""The page at `/`: files of this package, which talk to the server's own API and to nobody else.

`page.html` is all there is to see, `assets/main.js` where it begins. Other people's code is in `assets/vendor`, as
its makers published it.
"""

from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

HERE = Path(__file__).parent
ASSETS = "/assets"

# Whatever a model says, the browser runs nothing but our files, calls nobody else, and takes HTML only from the one
# place that makes it of markdown.
POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types markdown",
)
HEADERS = {
    "Content-Security-Policy": "; ".join(POLICY),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # keep it, and ask whether it is still the same
}


class Assets(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        try:
            response = await super().get_response(path, scope)
        except HTTPException as error:
            raise HTTPException(error.status_code, error.detail, {**HEADERS, **(error.headers or {})}) from error
        response.headers.update(HEADERS)
        return response


def add_dashboard(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(HERE / "page.html", headers=HEADERS)

    app.mount(ASSETS, Assets(directory=HERE / "assets"))
