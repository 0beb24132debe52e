"""`kitae ui`: a local web page that reads run folders and changes nothing in them."""
