"""The page at `/`: files of this package that talk only to the server's own API.

`page.html` is the whole page and `assets/main.js` its entry point. Third-party code is in `assets/vendor`, as its
authors published it.
"""

from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

HERE = Path(__file__).parent

# Whatever a model writes, the browser runs only our scripts, calls only this server, and accepts HTML only from the
# one function that renders markdown.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types markdown"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # cached, but revalidated every time
}


class Assets(StaticFiles):
    """Static files with our headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        try:
            response = await super().get_response(path, scope)
        except HTTPException as error:
            raise HTTPException(error.status_code, error.detail, HEADERS) from error
        response.headers.update(HEADERS)
        return response


def add_dashboard(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(HERE / "page.html", headers=HEADERS)

    app.mount("/assets", Assets(directory=HERE / "assets"))
